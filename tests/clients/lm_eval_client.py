"""lm-eval against a server: `lm_eval_client.py URL MODEL`. Its tasks are local, and the server
tokenizes."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import requests
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from report import run

URL, MODEL = sys.argv[1:]
STORIES = ["Once upon a time, there was a", "The little girl went to the", "He was very happy to"]
TASKS = {
    "endings": {
        "output_type": "multiple_choice", "doc_to_text": "{{story}}", "doc_to_choice": "{{ends}}",
        "doc_to_target": "{{right}}", "metric_list": [{"metric": "acc"}],
    },
    "stories": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{story}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "next": {
        "output_type": "generate_until", "doc_to_text": "{{story}}", "doc_to_target": "{{greedy}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


def post(url: str, **body: object) -> Any:
    return requests.post(url, json=body, timeout=60).json()


def complete(prompt: str) -> str:
    """As lm-eval asks: token ids, without the special one that begins a text."""
    ids = post(f"{URL.removesuffix('/v1')}/tokenize", prompt=prompt)["tokens"]
    found = post(
        f"{URL}/completions", model=MODEL, prompt=ids, max_tokens=8, temperature=0, stop=["\n\n"]
    )
    return str(found["choices"][0]["text"])


def evaluate(task: str, folder: Path) -> dict[str, Any]:
    """Figures of one task, and of each of its questions."""
    found = simple_evaluate(
        model="local-completions",
        model_args={"model": MODEL, "base_url": f"{URL}/completions", "num_concurrent": 2},
        tasks=[task], task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0, log_samples=True,
    )  # fmt: skip
    return {"samples": found["samples"][task], **found["results"][task]}


def endings() -> str:
    found = evaluate("endings", FOLDER)
    for sample in found["samples"]:
        (right, greedy), (wrong, _) = sample["filtered_resps"]
        assert greedy, sample  # what the model says by itself
        assert right > wrong, sample
    assert found["acc,none"] == 1.0
    return "accuracy 1.0"


def stories() -> str:
    bits = float(evaluate("stories", FOLDER)["bits_per_byte,none"])
    assert math.isfinite(bits)
    assert 0 < bits < 8
    return f"{bits:.3f} bits per byte"


def answers() -> str:
    found = evaluate("next", FOLDER)
    assert found["exact_match,none"] == 1.0, found["samples"]
    return "as asked by hand"


with tempfile.TemporaryDirectory() as name:
    FOLDER = Path(name)
    rows = []
    for story in STORIES:
        greedy = complete(story)
        rows.append({"story": story, "greedy": greedy, "ends": [greedy, " zqx"], "right": 0})
    (FOLDER / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for task, fields in TASKS.items():
        files = {"data_files": {"test": str(FOLDER / "rows.jsonl")}, "cache_dir": str(FOLDER)}
        data = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
        (FOLDER / f"{task}.yaml").write_text(
            json.dumps({"task": task, **data, "target_delimiter": "", **fields})
        )
    run({"endings": endings, "stories": stories, "answers": answers})
