"""Models in GGUF files: header, configuration, names of weights. Reads no weights.

`reader` reads one header, `file` joins the parts of a model, `config` and `names` turn it into what
transformers would have written.
"""
