"""Trains the small model that ships inside the package, from text that this script generates.

    python tools/train_bundled_model.py

Needs torch, transformers, tokenizers and safetensors. Writes a Hugging Face folder.
"""

import argparse
import json
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import mean

import torch
from safetensors import safe_open
from story_grammar.corpus import (
    ASSISTANT,
    BEGIN,
    CHAT_TEMPLATE,
    END,
    SPECIAL_TOKENS,
    USER,
    documents,
    tale_talks,
    tales,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
CONTEXT = 512  # tokens in a training row and in the model's longest input
VOCABULARY = 1024
ROWS = 2  # rows in a step
TRAIN_SEED, HELD_OUT_SEED = 1, 2
HELD_OUT_ROWS = 80
TOKENIZER_DOCUMENTS = 20_000


@dataclass(frozen=True)
class Stage:
    """A run of the optimiser from a warm-up to a rate of zero."""

    steps: int
    rate: float  # peak
    seed: int
    dense: Callable[[int], Iterator[str]]  # documents by seed
    dense_share: float  # of the first rows; falls to zero in a line
    dense_until: float  # share of the rows at which it is zero


# Without the dense documents it would take many more tokens until the model keeps names apart,
# in the first stage, and until it tells what was asked for, in the second.
STAGES = [
    Stage(6000, 3e-3, TRAIN_SEED, tales, dense_share=0.75, dense_until=0.5),
    Stage(3600, 2e-3, TRAIN_SEED + 10, tale_talks, dense_share=0.8, dense_until=1.0),
]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "python" / "helm" / "bundled")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on every stage's steps")
    parser.add_argument("--resume", type=Path, help="folder of a model after the first stage")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="compile the training step (C++)")
    return parser.parse_args()


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE: any text round-trips; encoding starts with <|begin|>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = islice(documents(TRAIN_SEED), TOKENIZER_DOCUMENTS)
    tokenizer.train_from_iterator(text, trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, begin)]
    )
    return tokenizer


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BEGIN),
        eos_token_id=tokenizer.token_to_id(END),
    )


def pack_rows(tokenizer: Tokenizer, texts: Iterator[str], count: int) -> torch.Tensor:
    """Documents laid end to end in rows that each start with one: [count, CONTEXT + 1]."""
    rows: list[list[int]] = [[]]
    for document in texts:
        if len(rows[-1]) > CONTEXT:
            if len(rows) == count:
                break
            rows.append([])
        rows[-1] += tokenizer.encode(document, add_special_tokens=False).ids
    return torch.tensor([row[: CONTEXT + 1] for row in rows])


def row_loss(model: LlamaForCausalLM, rows: torch.Tensor, begin: int) -> torch.Tensor:
    """Mean next-token loss of `rows`, [rows, CONTEXT + 1]. Documents do not see each other."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    document = (inputs == begin).cumsum(1)
    causal = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).tril()
    mask = causal & (document[:, None, :, None] == document[:, None, None, :])
    bias = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    logits = model(input_ids=inputs, attention_mask=bias).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first 3 %, then a cosine down to zero."""
    warm_up = max(1, steps * 3 // 100)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokenizer: Tokenizer, begin: int) -> float:
    rows = pack_rows(tokenizer, documents(HELD_OUT_SEED), HELD_OUT_ROWS)
    return sum(row_loss(model, row[None], begin).item() for row in rows) / len(rows)


@torch.no_grad()
def sample(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, heat: float = 0.0) -> str:
    """A continuation of the prompt; greedy where `heat` is zero."""
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=BEGIN not in prompt).ids])
    options = {"do_sample": heat > 0} | ({"temperature": heat, "top_k": 0} if heat > 0 else {})
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=300, pad_token_id=0, **options
    )
    return tokenizer.decode(output[0].tolist(), skip_special_tokens=False)


def initialise(model: LlamaForCausalLM) -> None:
    """Layers that start by adding nothing, so that early attention sees the tokens themselves."""
    for name, weight in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            torch.nn.init.zeros_(weight)
        elif "layernorm" not in name and "model.norm" not in name:
            torch.nn.init.normal_(weight, std=0.04 if "embed" in name else 0.09)


def training_rows(tokenizer: Tokenizer, stage: Stage, count: int) -> torch.Tensor:
    """Rows of usual documents, mixed with fewer and fewer of the stage's dense ones."""
    rng = random.Random(stage.seed)
    end = stage.dense_until * count
    is_dense = [rng.random() < stage.dense_share * (1 - row / end) for row in range(count)]
    dense = iter(pack_rows(tokenizer, stage.dense(stage.seed), sum(is_dense)))
    usual = iter(pack_rows(tokenizer, documents(stage.seed), count - sum(is_dense)))
    return torch.stack([next(dense if chosen else usual) for chosen in is_dense])


def train_stage(
    model: LlamaForCausalLM, tokenizer: Tokenizer, stage: Stage, args: argparse.Namespace
) -> float:
    """Trains in place and rounds to bfloat16. The mean loss over the last two hundred steps."""
    begin = tokenizer.token_to_id(BEGIN)
    steps = round(stage.steps * args.scale)
    rows = training_rows(tokenizer, stage, steps * ROWS)
    print(f"{len(rows)} rows of {CONTEXT} tokens", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.05)
    loss_of = torch.compile(row_loss) if args.compile else row_loss
    started = time.monotonic()
    recent: deque[float] = deque(maxlen=200)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, stage.rate)
        optimizer.zero_grad()
        batch = rows[step * ROWS : (step + 1) * ROWS]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch, begin)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append(loss.item())
        if (step + 1) % 200 == 0:
            elapsed = time.monotonic() - started
            print(f"step {step + 1}  loss {mean(recent):.4f}  {elapsed:.0f} s", flush=True)
        if (step + 1) % 1000 == 0:
            print(sample(model, tokenizer, "Once upon a time"), flush=True)
    model.bfloat16().float()
    return mean(recent)


def write_model(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """The folder that `from_pretrained` reads; `model` is already bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = [tokenizer.token_to_id(END)]
    model.save_pretrained(out)
    name_older_keys(out)
    tokenizer.save(str(out / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
    }
    settings = {
        "added_tokens_decoder": added,
        "additional_special_tokens": [USER, ASSISTANT],
        "bos_token": BEGIN,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": CONTEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def name_older_keys(out: Path) -> None:
    """Adds to config.json what readers older than transformers 5 look for."""
    path = out / "config.json"
    config = json.loads(path.read_text())
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"], "torch_dtype": "bfloat16"}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_card(
    args: argparse.Namespace, config: LlamaConfig, losses: tuple[float, float], seconds: float
) -> None:
    """README.md beside the weights. `losses` are the last training mean and the held-out one."""
    template = (ROOT / "tools" / "bundled_model_card.md").read_text()
    weights = args.out / "model.safetensors"
    with safe_open(weights, "pt") as file:
        parameters = sum(file.get_tensor(name).numel() for name in file.keys())
    card = template.format(
        parameters=f"{parameters:,}",
        weight_bytes=f"{weights.stat().st_size:,}",
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        feed_forward=config.intermediate_size,
        vocabulary=config.vocab_size,
        context=CONTEXT,
        steps=" + ".join(str(round(stage.steps * args.scale)) for stage in STAGES),
        step_tokens=ROWS * CONTEXT,
        rates=" and ".join(str(stage.rate) for stage in STAGES),
        minutes=round(seconds / 60),
        threads=args.threads,
        train_loss=f"{losses[0]:.3f}",
        held_out_loss=f"{losses[1]:.3f}",
    )
    (args.out / "README.md").write_text(card)


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    random.seed(0)
    if args.resume:
        tokenizer = Tokenizer.from_file(str(args.resume / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer()
    started = time.monotonic()
    if args.resume:
        model, stages = LlamaForCausalLM.from_pretrained(args.resume).float(), STAGES[1:]
    else:
        model, stages = LlamaForCausalLM(model_config(tokenizer)), STAGES
        initialise(model)
    print(f"{model.num_parameters()} parameters", flush=True)
    for stage in stages:
        train_loss = train_stage(model, tokenizer, stage, args)
    seconds = time.monotonic() - started
    model = model.bfloat16().eval()
    loss = held_out_loss(model, tokenizer, tokenizer.token_to_id(BEGIN))
    print(f"held-out loss {loss:.4f} in bfloat16, {seconds:.0f} s", flush=True)
    write_model(model, tokenizer, args.out)
    write_card(args, model.config, (train_loss, loss), seconds)
    for prompt in ("Once upon a time", "The old sailor"):
        print(sample(model, tokenizer, prompt, heat=0.8))


if __name__ == "__main__":
    main()
