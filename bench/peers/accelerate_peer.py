"""Measures Hugging Face Accelerate on one shape in a process of its own; prints one line of JSON.

Run by partitioned.py. The model is made without data, placed by `infer_auto_device_map` within the
same accelerator memory, given random weights where each was placed, and run with
`dispatch_model`: what lies in host memory is copied to the GPU in every step.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights
from accelerate.utils import set_module_tensor_to_device

NOISE = (1 << 22) - 3  # elements, repeated; as in random_weights.py
NO_CUDA = 77  # exit status


def make_model(config: dict[str, Any], dtype: torch.dtype, gpu_bytes: int | None) -> Any:
    """gpu_bytes None: all in host memory."""
    settings = transformers.AutoConfig.for_model(**config)
    with init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(settings, dtype=dtype)
    model.tie_weights()
    if gpu_bytes is None:
        places: dict[str, Any] = {"": "cpu"}
    else:
        places = infer_auto_device_map(
            model,
            max_memory={0: gpu_bytes, "cpu": 1 << 50},
            no_split_module_classes=model._no_split_modules,
            dtype=dtype,
        )
    noise = (0.03 * torch.randn(NOISE)).to(dtype)
    for name, parameter in list(model.named_parameters()):
        place = device_of(name, places)
        value = torch.empty(parameter.shape, dtype=dtype, device=place)
        if value.ndim == 1:
            value.fill_(1)
        else:
            fill(value.view(-1), noise.to(place))
        set_module_tensor_to_device(model, name, place, value=value, dtype=dtype)
    model.tie_weights()
    return dispatch_model(model, device_map=places).eval()


def device_of(name: str, places: dict[str, Any]) -> Any:
    """Of the longest prefix in the device map."""
    parts = name.split(".")
    prefixes = [".".join(parts[:n]) for n in range(len(parts), -1, -1)]
    return next(places[prefix] for prefix in prefixes if prefix in places)


def fill(target: torch.Tensor, noise: torch.Tensor) -> None:
    for first in range(0, len(target), len(noise)):
        part = target[first : first + len(noise)]
        part.copy_(noise[: len(part)])


class Peer:
    def __init__(self, model: Any, vocabulary: int, device: str) -> None:
        self.model, self.vocabulary, self.device = model, vocabulary, device

    def _synchronise(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def prefill(self, tokens: int) -> tuple[float, Any]:
        """(seconds, keys and values) of a prompt."""
        ids = [[(i * 7919 + 13) % self.vocabulary for i in range(tokens)]]
        prompt = torch.tensor(ids, device=self.device)
        self._synchronise()
        begin = time.perf_counter()
        out = self.model(prompt, use_cache=True, logits_to_keep=1)
        finite = bool(torch.isfinite(out.logits).all())
        seconds = time.perf_counter() - begin
        assert finite, "logits are not finite"
        return seconds, out.past_key_values

    def decode(self, cache: Any, steps: int, until: float) -> list[float]:
        """Seconds of each step, at least two; none begins after `until`."""
        token = torch.tensor([[1]], device=self.device)
        found: list[float] = []
        while len(found) < steps and (len(found) < 2 or time.perf_counter() < until):
            begin = time.perf_counter()
            out = self.model(token, past_key_values=cache, use_cache=True)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            int(token)
            found.append(time.perf_counter() - begin)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--bytes", type=int, help="of the GPU's memory; all on the CPU if missing")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prefill", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="after which no round begins")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    device = "cpu" if args.bytes is None else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no CUDA device")
        raise SystemExit(NO_CUDA)
    if args.threads:
        torch.set_num_threads(args.threads)
    config = json.loads(args.config.read_text())
    config.pop("torch_dtype", None)
    begin = time.perf_counter()
    model = make_model(config, getattr(torch, args.dtype), args.bytes)
    load_s = time.perf_counter() - begin
    peer = Peer(model, config["vocab_size"], device)
    decode_s: list[float] = []
    prefill_s: dict[int, list[float]] = {n: [] for n in args.prefill}
    with torch.inference_mode():
        peer.prefill(8)  # opens libraries and buffers
        end = time.perf_counter() + args.seconds
        for done in range(args.rounds):
            if done and time.perf_counter() > end:
                break
            _, cache = peer.prefill(args.context)
            decode_s += peer.decode(cache, args.steps, end)[1:]
            del cache
            for tokens in args.prefill:
                prefill_s[tokens].append(peer.prefill(tokens)[0])
    places = {} if args.bytes is None else model.hf_device_map
    report = {
        "load_s": load_s,
        "decode_s": decode_s,
        "prefill_s": prefill_s,
        "modules_on_gpu": sum(place == 0 for place in places.values()),
        "modules_on_cpu": sum(place == "cpu" for place in places.values()),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
