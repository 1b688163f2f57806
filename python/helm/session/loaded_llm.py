"""What a loaded model is and holds; generates nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from helm.base.summaries import Summarized
from helm.errors import InvalidError
from helm.session.here import units_by_device
from helm.session.open import LoadedModel
from helm.session.service import CLOSED
from helm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from helm.model.config import ModelConfig
    from helm.plan.schema import Plan
    from helm.session.speculation import Speculation


class LoadedLLM(Summarized):
    """The properties of an LLM."""

    _speculation: Speculation

    def _hold(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._engine: Any = loaded.engine
        loaded.engine = None

    def _summary(self) -> tuple[str, dict[str, str]]:
        _, facts = self.plan._summary()
        facts = {"family": self.plan.model.architecture, **facts}
        return self.name, facts if self._engine is not None else {"state": "closed"}

    @property
    def plan(self) -> Plan:
        """What runs where, and the memory it takes."""
        return self._loaded.plan

    @property
    def config(self) -> ModelConfig:
        """The model's architecture."""
        return self._loaded.config

    @property
    def folder(self) -> Path | None:
        """Where the checkpoint lies; None for a module in memory."""
        return self._loaded.folder

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None for a model without one (from_torch)."""
        return self._loaded.tokenizer

    @property
    def max_new_tokens(self) -> int | None:
        """New tokens at most as the model's generation_config.json recommends; None: it does
        not."""
        return self._loaded.defaults.max_new_tokens

    @property
    def name(self) -> str:
        """The folder's name, the Hugging Face id or the module's class."""
        return self._loaded.name

    @property
    def context(self) -> int:
        """Positions a sequence may have, prompt and output together."""
        return self.plan.limits.context

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.plan.model.vocab_size

    @property
    def stats(self) -> dict[str, Any]:
        """The engine's own account: bytes, threads, isa, load time.

        Of `threads`, `active_threads` decode; the others sleep while other programs are busy.
        `devices` lists the CPU and, if the plan uses one, the accelerator: what it is, which
        `units` it holds ("embedding", "layers 0-3", ...), and bytes by purpose. `experts` counts,
        of mixtures on the CPU, `runs` (a layer of a step each), their `rows` (tokens), the
        `distinct` experts that were read, summed over the runs, and how many were `expected`, each
        chosen as often as any other. `predicted` is the plan's decode rate in tokens/s, None for a
        plan made without a profile. `speculation`
        has how tokens are guessed (`by`: "ngram", "model" or "off"), the `reason` why they are not,
        and of a `draft` its `name`, `memory_bytes`, `context` and `threads`.
        """
        stats = dict(self._open_engine().stats)
        held = units_by_device(self.plan)
        for use in stats["devices"]:
            use["units"] = held[use["device"]]
        prediction = self.plan.prediction
        stats["predicted"] = (
            None if prediction is None else prediction.predicted.decode_tokens_per_s
        )
        stats["speculation"] = self._speculation.describe()
        return stats

    def _open_engine(self) -> Any:
        if self._engine is None:
            raise InvalidError(CLOSED)
        self._engine.check_process()
        return self._engine
