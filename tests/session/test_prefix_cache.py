"""KV that is not computed twice: shared within a call, kept between calls, saved in files."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import helm
from device_profiles import fast_accelerator, half_of_it
from kv_file import checksums, replaced

SYSTEM = "Once upon a time there was a little dog who lived near the sea with a girl. " * 4
QUESTIONS = ["Then", "The dog said", "One day", "She", "It was", "Ben", "A cat came", "They", "He"]
PROMPTS = [SYSTEM + question for question in QUESTIONS]
SAMPLED: dict[str, Any] = {
    "max_tokens": 12, "temperature": 0.9, "seed": 5, "logprobs": 2, "ignore_eos": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def plain() -> Iterator[helm.LLM]:
    """Computes everything."""
    with helm.LLM(prefix_cache=False) as llm:
        yield llm


def results(completions: list[helm.Completion]) -> list[Any]:
    return [(c.text, c.tokens, c.logprobs, c.finish_reason, c.seed) for c in completions]


def computed(completions: list[helm.Completion]) -> int:
    return sum(c.timings.prefill_tokens for c in completions)


def shared_tokens(llm: helm.LLM) -> int:
    assert llm.tokenizer is not None
    rows = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    return next(i for i, column in enumerate(zip(*rows, strict=False)) if len(set(column)) > 1)


def conversation(*turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


@pytest.mark.parametrize("max_sequences", [1, 3, 8, 12])
def test_prompts_of_one_call_share_their_prefix(plain: helm.LLM, max_sequences: int) -> None:
    want = plain.generate(PROMPTS, **SAMPLED)
    assert computed(want) == sum(c.prompt_tokens for c in want)
    with helm.LLM(max_sequences=max_sequences) as llm:
        shared = shared_tokens(llm)
        first = llm.generate(PROMPTS, **SAMPLED)
        assert results(first) == results(want)
        # All but one prompt begin with what another computed; a little may be not worth waiting.
        assert computed(first) <= computed(want) - (len(PROMPTS) - 1) * (shared - 15)
        again = llm.generate(PROMPTS, **SAMPLED)
        assert results(again) == results(want)
        assert computed(again) <= computed(want) - len(PROMPTS) * (shared - 15)


def test_every_kind_of_call_finds_what_others_computed(plain: helm.LLM) -> None:
    with helm.LLM() as llm:
        whole = llm.generate(PROMPTS[0], **SAMPLED)
        assert whole.timings.prefill_tokens == whole.prompt_tokens
        again = llm.generate(PROMPTS[0], **SAMPLED)
        assert again.timings.prefill_tokens == 1
        chunks = list(llm.stream(PROMPTS[1], **SAMPLED))
        streamed = chunks[-1].completion
        assert streamed is not None
        assert streamed.timings.prefill_tokens < 20
        want = [plain.generate(prompt, **SAMPLED) for prompt in PROMPTS[:2]]
        assert results([whole, streamed]) == results(want)
        talk = conversation(SYSTEM)
        answer = llm.chat(talk, max_tokens=8, temperature=0)
        assert answer.timings.prefill_tokens == answer.prompt_tokens
        talk += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "Why?"}]
        next_answer = llm.chat(talk, max_tokens=8, temperature=0)
        assert next_answer.timings.prefill_tokens < 40
        assert next_answer.tokens == plain.chat(talk, max_tokens=8, temperature=0).tokens
        # A stream that is still open is shared, too.
        with llm.stream(PROMPTS[2], **SAMPLED) as one:
            next(one)
            other = llm.generate(PROMPTS[2], **SAMPLED)
            rest = list(one)[-1].completion
        assert rest is not None
        assert other.timings.prefill_tokens == 1
        assert results([other, rest]) == results(plain.generate([PROMPTS[2]] * 2, **SAMPLED))


def test_a_cancelled_prompt_leaves_what_it_computed(plain: helm.LLM) -> None:
    with helm.LLM() as llm:
        with llm.stream(PROMPTS[0], **SAMPLED) as stream:
            next(stream)
        again = llm.generate(PROMPTS[0], **SAMPLED)
        assert again.timings.prefill_tokens == 1
        assert results([again]) == results([plain.generate(PROMPTS[0], **SAMPLED)])


def test_kept_prefixes_never_refuse_a_call(plain: helm.LLM) -> None:
    """Pages for one context of 300, and prompts of any length in any order."""
    with helm.LLM(context=300, max_sequences=1, page_tokens=16) as llm:
        assert llm.tokenizer is not None
        tokens = llm.tokenizer.encode(SYSTEM * 6)
        for step in range(30):
            prompt = tokens[step % 3 : step % 3 + 10 + 53 * step % 280]
            expected = plain.generate(prompt, max_tokens=4, temperature=0).tokens
            assert llm.generate(prompt, max_tokens=4, temperature=0).tokens == expected
        assert len(llm.logits(tokens[:300])) == 300  # the whole context at once
        assert llm._service.kept == 0


def test_threads_share_prefixes_while_pages_run_out(plain: helm.LLM) -> None:
    expected = [plain.generate(prompt, max_tokens=10, temperature=0).tokens for prompt in PROMPTS]
    failures: list[BaseException | str] = []
    with helm.LLM(context=160, max_sequences=3, page_tokens=16) as llm:

        def work(first: int) -> None:
            options: dict[str, Any] = {"max_tokens": 10, "temperature": 0}
            try:
                for i in range(first, first + 6):
                    which = [i % 9, (i + 4) % 9, (i + 5) % 9]
                    got = [c.tokens for c in llm.generate([PROMPTS[w] for w in which], **options)]
                    streamed = [t for c in llm.stream(PROMPTS[i % 9], **options) for t in c.tokens]
                    if got != [expected[w] for w in which] or streamed != expected[i % 9]:
                        failures.append(f"other tokens in call {i}")
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(3 * n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert failures == []
        llm._service.clear()
        assert llm._service.open(160)[1] == 0  # nothing has leaked


def test_a_stream_outlives_its_llm() -> None:
    llm = helm.LLM()
    expected = llm.generate(PROMPTS[0], max_tokens=10, temperature=0).tokens
    stream = llm.stream(PROMPTS[0], max_tokens=10, temperature=0)
    next(stream)
    llm.close()
    for _ in stream:
        pass
    assert stream.completion.tokens == expected
    for call in (lambda: llm.save_kv("x"), lambda: llm.load_kv("x")):
        with pytest.raises(helm.InvalidError, match="closed"):
            call()


def test_on_two_devices() -> None:
    with helm.LLM(device="sim", profile=fast_accelerator()) as whole:
        device = f"sim:vram={half_of_it(whole)}"
    options: dict[str, Any] = {"device": device, "profile": fast_accelerator(), "batch": 3}
    with (
        helm.LLM(**options, prefix_cache=False) as computing,
        helm.LLM(**options) as llm,
    ):
        assert min(llm.plan.units_cpu, llm.plan.units_accelerator) > 0
        want, got = computing.generate(PROMPTS, **SAMPLED), llm.generate(PROMPTS, **SAMPLED)
        assert results(got) == results(want)
        assert computed(got) < computed(want) / 3


# --- files ---------------------------------------------------------------------------------------


def test_a_saved_cache_goes_on_in_another_llm(plain: helm.LLM, tmp_path: Path) -> None:
    path = tmp_path / "talk.kv"
    talk = conversation("Hello! " + SYSTEM)
    seen: list[tuple[int, int]] = []
    with helm.LLM() as llm:
        with pytest.raises(helm.InvalidError, match="nothing to save"):
            llm.save_kv(path)
        answer = llm.chat(talk, max_tokens=8, temperature=0)
        talk += conversation("", answer.text)[1:]
        count = llm.save_kv(path, messages=talk, progress=lambda *c: seen.append(c))
        assert count == answer.prompt_tokens + len(answer.tokens) - 1
        assert seen[-1][0] == seen[-1][1] < path.stat().st_size
    with helm.LLM(max_sequences=1) as llm:
        saved = llm.load_kv(str(path))
        assert (saved.cached, saved.messages) == (count, talk)
        assert saved.tokens[-len(answer.tokens) :] == answer.tokens
        talk.append({"role": "user", "content": "And then?"})
        next_answer = llm.chat(talk, max_tokens=8, temperature=0)
        reused = next_answer.prompt_tokens - next_answer.timings.prefill_tokens
        assert count - 3 <= reused <= count  # the template may end a turn otherwise
        assert next_answer.tokens == plain.chat(talk, max_tokens=8, temperature=0).tokens
        # Saved again, the file is that of the longer conversation.
        assert llm.save_kv(path) > count
        assert llm.load_kv(path).messages is None


def test_text_goes_on_where_a_saved_one_ended(plain: helm.LLM, tmp_path: Path) -> None:
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    want = plain.generate(SYSTEM, max_tokens=30, **options).tokens
    with helm.LLM() as llm:
        llm.generate(SYSTEM, max_tokens=10, **options)
        llm.save_kv(tmp_path / "story.kv")
    with helm.LLM() as llm:
        rest = llm.generate(llm.load_kv(tmp_path / "story.kv").tokens, max_tokens=20, **options)
        assert rest.tokens == want[10:]
        assert rest.timings.prefill_tokens == 1


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    with helm.LLM(context=256) as llm:
        llm.generate(SYSTEM, max_tokens=2)
        llm.save_kv(path)
        whole = path.read_bytes()
        for content, message in (
            (b"", "too short"),
            (b"not a cache at all, but a text", "no KV cache saved by"),
            (whole[:-1], "damaged"),
            (whole + b"x", "damaged"),
            (whole[:40], "damaged"),
            (
                replaced(whole, b'\\"messages\\": null', b'\\"messages\\": 1   '),
                "expected an array",
            ),
            (replaced(whole, b'"layers":', b'"lagers":'), "lagers"),
            (replaced(whole, b'"layers":', b'"la\xffers":'), "ill-formed UTF-8"),
            (whole.replace(b"HELM-KV2", b"HELM-KV1"), "format 1, this one reads format 2"),
        ):
            path.write_bytes(content)
            with pytest.raises(helm.InvalidError, match=message):
                llm.load_kv(path)
        with pytest.raises(helm.CheckpointError, match="cannot read"):
            llm.load_kv(tmp_path / "absent.kv")
        assert len(llm.generate(SYSTEM, max_tokens=2).tokens) == 2
    path.write_bytes(whole)
    for options, message in (
        ({"kv_dtype": "f32"}, "dtype"),
        ({"dtype": "f32"}, "weights"),
        ({"context": 64}, "64"),
        ({"prefix_cache": False}, "prefix_cache=False"),
    ):
        arguments: dict[str, Any] = {"context": 256, **options}
        with (
            helm.LLM(**arguments) as other,
            pytest.raises(helm.InvalidError, match=message),
        ):
            other.load_kv(path)


def test_a_damaged_file_is_refused_wherever_a_byte_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    with helm.LLM(context=256, kv_dtype="i8") as llm:
        llm.generate(SYSTEM, max_tokens=2)
        llm.save_kv(path)
        whole = path.read_bytes()
        checksums(whole)
        for place in [*range(0, 400, 3), *range(400, len(whole), len(whole) // 50), -1]:
            changed = bytearray(whole)
            changed[place] ^= 0x81  # no UTF-8 any more
            path.write_bytes(changed)
            with pytest.raises(helm.InvalidError, match=r"damaged|format|no KV cache"):
                llm.load_kv(path)
        path.write_bytes(whole)
        assert llm.load_kv(path).cached > 64


def test_a_save_follows_links_and_keeps_what_others_may_read(tmp_path: Path) -> None:
    file, link, dangling = tmp_path / "a.kv", tmp_path / "link.kv", tmp_path / "dangling.kv"
    folder = tmp_path / "folder"
    folder.mkdir()
    with helm.LLM(context=256) as llm:
        llm.generate(SYSTEM, max_tokens=2)
        llm.save_kv(file)
        saved = file.read_bytes()
        assert file.stat().st_mode & 0o777 == 0o600  # a conversation is nobody else's
        for mode in (0o640, 0o604, 0o600):
            file.write_bytes(b"old")
            file.chmod(mode)
            llm.save_kv(file)
            assert (file.stat().st_mode & 0o777, file.read_bytes()) == (mode, saved)
        link.symlink_to(Path("folder") / ".." / "link2.kv")
        (tmp_path / "link2.kv").symlink_to(file)
        file.write_bytes(b"old")
        llm.save_kv(link)
        assert link.is_symlink()
        assert file.read_bytes() == saved
        dangling.symlink_to(folder / "new.kv")
        llm.save_kv(dangling)
        assert (folder / "new.kv").read_bytes() == saved
        assert dangling.is_symlink()
        (tmp_path / "loop.kv").symlink_to("loop.kv")
        with pytest.raises(helm.CheckpointError, match=os.strerror(errno.ELOOP)):
            llm.save_kv(tmp_path / "loop.kv")


def test_only_a_file_is_replaced_or_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "folder").mkdir()
    with helm.LLM(context=256) as llm:
        llm.generate(SYSTEM, max_tokens=2)
        for name in ("pipe", "link", "folder"):
            with pytest.raises(helm.InvalidError, match=r"cannot write .*: it is no file"):
                llm.save_kv(tmp_path / name)
            with pytest.raises(helm.InvalidError, match="is no saved KV cache: it is no file"):
                llm.load_kv(tmp_path / name)
        assert (tmp_path / "pipe").is_fifo()
        for call in (llm.save_kv, llm.load_kv):
            with pytest.raises(helm.InvalidError, match="NUL"):
                call(f"{tmp_path}/a\0b")
        assert sorted(os.listdir(tmp_path)) == ["folder", "link", "pipe"]


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    with helm.LLM() as llm:
        llm.generate(PROMPTS[0], max_tokens=2)
        llm.save_kv(path)
        before = path.read_bytes()
        llm.generate(PROMPTS[1], max_tokens=2)

        def cancel(_done: int, _total: int) -> None:
            raise RuntimeError("enough")

        with pytest.raises(RuntimeError, match="enough"):
            llm.save_kv(path, progress=cancel)
        with pytest.raises(helm.InvalidError, match="JSON"):
            llm.save_kv(path, messages=[{"role": "user", "content": object()}])
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limit[1]))
            with pytest.raises(helm.CheckpointError, match=os.strerror(errno.EFBIG)):
                llm.save_kv(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            signal.signal(signal.SIGXFSZ, ignored)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["a.kv"]
        with pytest.raises(helm.CheckpointError, match="cannot write"):
            llm.save_kv(tmp_path / "absent" / "a.kv")


def test_ctrl_c_ends_saving_and_loading(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    with helm.LLM() as llm:
        first = llm.generate(SYSTEM, max_tokens=2, temperature=0)

        def interrupt(_done: int, _total: int) -> None:
            signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            llm.save_kv(path, progress=interrupt)
        assert os.listdir(tmp_path) == []
        llm.save_kv(path)
        llm._service.clear()
        with pytest.raises(KeyboardInterrupt):
            llm.load_kv(path, progress=interrupt)
        again = llm.generate(SYSTEM, max_tokens=2, temperature=0)
        assert (again.tokens, again.timings.prefill_tokens) == (first.tokens, first.prompt_tokens)
