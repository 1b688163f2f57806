"""What people see of HELM in a terminal or a notebook of Python: summaries and progress bars."""

from __future__ import annotations

import io
import re
import sys
import types
from typing import Any, TypeVar

import pytest

import helm
import helm.base.progress
import small_models
from device_profiles import fast_accelerator
from helm.base.summaries import Summarized

PROMPTS = ["Once upon a time", "The dog"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


T = TypeVar("T", bound=io.StringIO)


def shown_on(stream: T, monkeypatch: pytest.MonkeyPatch) -> T:
    """Standard error for the rest of a test, which has no patience; not for a fixture, as pytest
    changes it between both."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(helm.base.progress, "_PATIENCE_S", 0.0)
    return stream


def test_objects_are_one_short_line() -> None:
    with helm.LLM(context=64) as llm:
        shown = [repr(thing) for thing in (llm, llm.plan, llm.tokenizer)]
        for line in shown:
            assert len(line) < 200
            assert "\n" not in line
        assert shown[0].startswith("<LLM bundled: LlamaForCausalLM, 7 units on the CPU")
        assert "context 64" in shown[0]
        assert shown[1].startswith("<Plan LlamaForCausalLM: 7 units on the CPU")
        assert shown[2].startswith("<Tokenizer of 1,024 tokens: ")
        assert "chat templates: default" in shown[2]
    assert repr(llm) == "<LLM bundled: closed>"


def test_a_plan_says_what_lies_on_an_accelerator() -> None:
    module = small_models.make_model("llama")
    with helm.LLM.from_torch(module, device="sim", profile=fast_accelerator()) as llm:
        assert f", {llm.plan.units_accelerator} on the accelerator" in repr(llm)


def test_notebooks_get_a_table_without_anybody_else_s_markup() -> None:
    class Thing(Summarized):
        def _summary(self) -> tuple[str, dict[str, str]]:
            return "<b>x</b>\n", {"a & b": "<script>" + "y" * 1000}

    shown = Thing()._repr_html_()
    assert re.fullmatch(
        r"<table><caption>Thing &lt;b&gt;x&lt;/b&gt;</caption><tr>.*</table>", shown
    )
    assert "<th>a &amp; b</th><td>&lt;script&gt;" in shown
    assert len(shown) < 300
    with helm.LLM() as llm:
        for thing in (llm, llm.plan, llm.tokenizer):
            assert thing is not None
            assert thing._repr_html_().count("<tr>") >= 2


def test_loading_and_batches_show_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = shown_on(Terminal(), monkeypatch)
    with helm.LLM() as llm:
        assert "loading weights" in stderr.getvalue()
        stderr.truncate(0)
        llm.generate(PROMPTS[0], max_tokens=2)
        assert stderr.getvalue() == ""
        llm.generate(PROMPTS, max_tokens=2)
        assert re.search(r"generating:.*/2 \[", stderr.getvalue())


def test_a_bar_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = shown_on(Terminal(), monkeypatch)
    with helm.LLM(progress=False) as llm:
        llm.generate(PROMPTS, max_tokens=2, progress=False)
    assert stderr.getvalue() == ""


def test_elsewhere_there_is_none_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = shown_on(io.StringIO(), monkeypatch)
    with helm.LLM() as llm:
        llm.generate(PROMPTS, max_tokens=2)
        assert pipe.getvalue() == ""
        llm.generate(PROMPTS, max_tokens=2, progress=True)
    assert "generating" in pipe.getvalue()
    with helm.LLM.from_torch(small_models.make_model("llama"), progress=True):
        assert "loading weights" in pipe.getvalue()


def test_notebooks_count_as_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    shown_on(io.StringIO(), monkeypatch)
    assert not helm.base.progress.watched()
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    assert helm.base.progress.watched()


@pytest.mark.parametrize("stream", [None, "closed"])
def test_no_terminal_is_no_failure(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed if stream else None)
    with helm.LLM() as llm:
        assert len(llm.generate(PROMPTS, max_tokens=2)) == 2


def test_a_call_is_still_what_reports_progress() -> None:
    seen: list[tuple[int, int]] = []
    with helm.LLM(progress=lambda done, total: seen.append((done, total))):
        assert seen[-1][0] == seen[-1][1] > 0
    with pytest.raises(helm.InvalidError, match="progress must be True, False or callable as"):
        helm.LLM(progress=3)  # type: ignore[arg-type]
    with helm.LLM() as llm, pytest.raises(helm.InvalidError, match=r"\[generate\] progress must"):
        llm.generate(PROMPTS, progress="yes")  # type: ignore[call-overload]
