"""How far the answers of one model are from those of another with the same tokenizer, on a few
hundred tokens of a fixed text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from helm.model.model_files import ModelFiles
from helm.session.here import load_engine
from helm.session.host_memory import logits_array
from helm.session.options import LoadOptions
from helm.text.tokenizer import Tokenizer

_MOST_TOKENS = 256
_TEXT = (
    "The harbour woke before the sun did. Anna pushed the boat from the stones, took the oars and "
    "counted the strokes, as her grandfather had taught her: forty to the lighthouse, ninety to "
    'the outer buoy. "You only need three numbers," he used to say, "the depth, the wind and the '
    'hour." Behind her, in the kitchen, the radio read the forecast: 12 knots from the west, rain '
    "after 4 p.m., visibility good.\n\n"
    "A mixture of two liquids boils at a temperature that depends on its composition. If the "
    "vapour is richer in one component than the liquid is, then distillation separates them; the "
    "more often it is repeated, the purer the product becomes. In 1830 Aeneas Coffey patented a "
    "still that does this without interruption.\n\n"
    "def mean(values):\n"
    '    """The arithmetic mean of a list that is not empty."""\n'
    "    total = 0.0\n"
    "    for value in values:\n"
    "        total += value\n"
    "    return total / len(values)\n\n"
    "Question: which of the following is the capital of Portugal? (a) Porto (b) Lisbon (c) Faro\n"
    "Answer: (b) Lisbon. It lies where the Tagus meets the Atlantic Ocean, and some 500,000 people "
    "live within the limits of the city.\n"
)


@dataclass(frozen=True)
class Divergence:
    """kl: mean Kullback-Leibler divergence of the second model's distribution of the next token
    from the first one's, in nats. same_token: share of positions at which both find the same token
    most likely. tokens: positions."""

    kl: float
    same_token: float
    tokens: int


def compare(
    first: ModelFiles, second: ModelFiles, tokenizer: Tokenizer, threads: int | None
) -> Divergence:
    """Both on the CPU, with weights as they are stored, one after the other. Raises
    OutOfMemoryError where one does not fit, and what loading raises."""
    tokens = tokenizer.encode(_TEXT)[: min(_MOST_TOKENS, first.config.max_context)]
    kl, same = 0.0, 0
    for p, q in zip(_logits(first, tokens, threads), _logits(second, tokens, threads), strict=True):
        own, other = _log_softmax(p), _log_softmax(q)
        kl += float(np.sum(np.exp(own) * (own - other)))
        same += int(np.argmax(p) == np.argmax(q))
    return Divergence(max(0.0, kl / len(tokens)), same / len(tokens), len(tokens))


def _logits(files: ModelFiles, tokens: list[int], threads: int | None) -> npt.NDArray[np.float32]:
    """[tokens, vocab]; the model is loaded for no longer."""
    weights = files.weights()
    options = LoadOptions(
        context=len(tokens), max_sequences=1, threads=threads, weights="mapped", device="cpu"
    )
    folder = str(files.folder)
    _, engine = load_engine(weights.config, weights.tensors, folder, {}, options)
    out = logits_array(len(tokens), weights.config.vocab_size, len(tokens))
    out[:] = engine.forward(engine.open(len(tokens)), np.array(tokens, np.int32), True)
    return out


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.sum(np.exp(wide)))
    return wide
