"""Headers of GGUF files on the Hugging Face hub, by range requests: a few MiB of a file of any
size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from helm.errors import CheckpointError
from helm.model.download import GgufOnHub, hub_errors
from helm.model.gguf.cursor import Source
from helm.model.gguf.file import Gguf, read_remote

STEP_BYTES = 8 << 20  # of one answer
_ANSWER_S = 30.0  # for one


def read_hub(model: GgufOnHub, vectors: tuple[str, ...] = ()) -> Gguf:
    """The headers of a model on the hub. vectors: see `read_gguf`. CheckpointError says why not."""

    @contextlib.contextmanager
    def opened(name: str) -> Iterator[Source]:
        if name not in model.sizes:
            raise CheckpointError(f"[hub] {model.repo_id}: {name} does not exist")
        yield _RemoteFile(f"{model.repo_id}/{name}", model.sizes[name], model, name)

    return read_remote(next(iter(model.sizes)), opened, vectors)


@dataclass(frozen=True)
class _RemoteFile:
    """A `Source` on the hub."""

    name: str
    size: int
    model: GgufOnHub
    file: str
    step: int = STEP_BYTES

    def read(self, begin: int, count: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented all the same
            build_hf_headers,
            get_session,
            hf_raise_for_status,
        )

        url = hf_hub_url(self.model.repo_id, self.file, revision=self.model.revision)
        wanted = "bytes" + f"={begin}-{begin + count - 1}"
        headers = {**build_hf_headers(), "Range": wanted}
        with hub_errors(self.model.repo_id, self.model.revision):
            answer = get_session().get(url, headers=headers, timeout=_ANSWER_S)
            hf_raise_for_status(answer)
        data: bytes = answer.content
        if answer.status_code != 206 or len(data) != count:
            raise CheckpointError(
                f"[hub] {self.name}: asked for bytes {begin} to {begin + count}, got {len(data)} "
                f"with status {answer.status_code}; the server gives no parts of files, so "
                f"download it: hf download {self.model.repo_id} {self.file}"
            )
        return data
