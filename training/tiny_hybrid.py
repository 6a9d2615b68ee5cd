"""Train the tiny hybrid: a small Qwen3.5 text model on the language of `tiny_language`.

    python training/tiny_hybrid.py --out DIR [--threads 2]

Documents grow from 64 to 1,024 words by stages. Progress is kept in DIR every hundred steps, and
the same command goes on where it stopped. When it is done, DIR holds the model in bfloat16, its
tokenizer, and `training.jsonl`: one line per report, the last with the recall of held-out prompts.
It takes about an hour on two quiet CPU cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvfold.evaluation.tasks.recall import recall
from kvfold.evaluation.tiny_language import (
    RECALL_KINDS,
    VOCABULARY,
    recall_prompt,
    training_document,
)

SEED = 1
PATTERN = ("linear_attention",) * 3 + ("full_attention",)
LAYERS = 12
HIDDEN = 128
HEAD = 64
MEMORY = (2.0, 8.0, 32.0, 128.0)
"""Tokens after which the state of a layer's four heads is down to 1/e when training begins."""
WARM_UP = 50
COOL_DOWN = 800
"""Steps over which learning rates rise in the beginning, and fall to nothing in the end."""
MUON_RATE, ADAM_RATE, NORM_RATE = 0.005, 1e-3, 5e-3
"""Four times these rates drown what is learnt about recall: attention finds the place, and the
word there is never told. `NORM_RATE` is that of the query and key norms, which sharpen it."""
TEXT_WEIGHT = 0.5
"""Of the mean loss of words outside answers, against 1 for those of answers."""
ENDINGS = (".", "end")
ENDING_WEIGHT = 0.05
HALF_LIFE = 24.0
SHORT_WEIGHT = 0.2
"""Of the mean, over tokens and heads, of how much log half-lives are above `HALF_LIFE`. So facts
are left to the attention layers, and the states of linear ones hold what was said a moment ago."""
GUIDED_LAYER, GUIDED_HEADS = 7, (0, 2)
GUIDE_WEIGHT, GUIDE_STEPS, GUIDE_FADE = 0.5, 250, 100
"""In the beginning, heads of both key groups of one upper attention layer are shown where an answer
stands: their mean log attention to it is part of the loss, fading over the last steps of this. So
recall is learnt sooner, and by a layer that prefill skipping skips."""
REPORT_EVERY = 10
SAVE_EVERY = 100
HELD_OUT_PROMPTS = 100
"""Of each kind and length, from seeds that no training document has."""


class Stage(NamedTuple):
    """So many steps on batches of documents of one length."""

    length: int
    batch: int
    steps: int


STAGES = (
    Stage(64, 32, 250),
    Stage(128, 16, 300),
    Stage(256, 8, 500),
    Stage(512, 8, 800),
    Stage(1024, 4, 900),
)


def make_model() -> Any:
    """The model with random weights: transformers' own class, states of four memory lengths."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=-(-len(VOCABULARY) // 16) * 16,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        layer_types=list(PATTERN * (LAYERS // 4)),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    torch.manual_seed(SEED)
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            if hasattr(layer, "linear_attn"):
                mixer = layer.linear_attn
                step = F.softplus(mixer.dt_bias)
                mixer.A_log.copy_(-(torch.tensor(MEMORY) * step).log())
    return model


IDS = {word: index for index, word in enumerate(VOCABULARY)}


class Batch(NamedTuple):
    """Documents of one length, and what is asked of the model.

    ids, weights, sources: (documents, words). weights: of each word as part of an answer, 0 for
    other words; the words that end an answer are always alike and weigh little. sources: where in
    the document a telling word of an answer stands already, -1 for other words.
    """

    ids: Tensor
    weights: Tensor
    sources: Tensor


def batch_of(step: int, stage: Stage) -> Batch:
    """The documents of one step: no other step has them."""
    shape = (stage.batch, stage.length)
    batch = Batch(torch.empty(shape, dtype=torch.long), torch.zeros(shape), torch.full(shape, -1))
    for row in range(stage.batch):
        seed = f"train {SEED} {step} {row} {stage.length}"
        words, answers = training_document(seed, stage.length)
        batch.ids[row] = torch.tensor([IDS[word] for word in words])
        for answer in answers:
            for place in range(answer.start, answer.stop):
                telling = words[place] not in ENDINGS
                batch.weights[row, place] = 1.0 if telling else ENDING_WEIGHT
                if telling:
                    batch.sources[row, place] = answer.source + place - answer.start
    return batch


def optimisers(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for embeddings, norms, gates and convolutions."""
    matrices, norms, rest = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            matrices.append(parameter)
        else:
            (norms if "q_norm" in name or "k_norm" in name else rest).append(parameter)
    made: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=MUON_RATE, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(
            [{"params": rest}, {"params": norms, "lr": NORM_RATE}],
            lr=ADAM_RATE,
            betas=(0.9, 0.95),
            weight_decay=0.0,
        ),
    ]
    for group in (group for optimiser in made for group in optimiser.param_groups):
        group["full_rate"] = group["lr"]
    return made


def set_rates(optimisers: list[torch.optim.Optimizer], step: int, steps: int) -> None:
    """Warm up, hold, and go down to nothing over the last part."""
    share = min(1.0, (step + 1) / WARM_UP, (steps - step) / COOL_DOWN)
    for group in (group for optimiser in optimisers for group in optimiser.param_groups):
        group["lr"] = group["full_rate"] * share


def train_step(model: Any, batch: Batch, gates: Gates, guide: float) -> dict[str, float]:
    """Gradients of one batch, and its losses (nats per word). guide: weight of `guidance`."""
    model.set_attn_implementation("eager" if guide else "sdpa")
    output = model(batch.ids, use_cache=False, output_attentions=guide > 0)
    logits = output.logits[:, :-1]
    targets, weights = batch.ids[:, 1:], batch.weights[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    losses = losses.view_as(weights)
    telling, is_text = batch.sources[:, 1:] >= 0, weights == 0
    answer_loss = (losses * weights).sum() / weights.sum()
    text_loss = losses[is_text].mean()
    too_long = gates.excess()
    loss = answer_loss + TEXT_WEIGHT * text_loss + SHORT_WEIGHT * too_long
    if guide:
        loss = loss + guide * guidance(output.attentions, batch.sources)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    hits = ((logits.argmax(-1) == targets) & telling).sum() / telling.sum()
    found = {"text": text_loss, "answer": answer_loss, "hit": hits, "too_long": too_long}
    return {name: float(value.detach()) for name, value in found.items()}


def guidance(attentions: tuple[Tensor | None, ...], sources: Tensor) -> Tensor:
    """Mean of -log(attention to where the next word stands), over guided heads and answers."""
    seen = [weights for weights in attentions if weights is not None][GUIDED_LAYER // len(PATTERN)]
    row, before = (sources[:, 1:] >= 0).nonzero(as_tuple=True)
    guided = seen[row, :, before, sources[row, before + 1]][:, GUIDED_HEADS]
    return -(guided + 1e-4).log().mean()


class Gates:
    """Watches the decays of every linear layer during a forward."""

    def __init__(self, model: Any) -> None:
        self.seen: list[Tensor] = []
        for layer in model.model.layers:
            if hasattr(layer, "linear_attn"):
                mixer = layer.linear_attn
                mixer.in_proj_a.register_forward_hook(self._watch(mixer))

    def _watch(self, mixer: Any) -> Any:
        def hook(_: Any, __: Any, a: Tensor) -> None:
            self.seen.append(mixer.A_log + F.softplus(a + mixer.dt_bias).log())

        return hook

    def excess(self) -> Tensor:
        """Mean of log(half-life / HALF_LIFE) where that is positive, of the last forward."""
        rates, self.seen = torch.stack(self.seen), []
        return (math.log(math.log(2) / HALF_LIFE) - rates).relu().mean()


class Log:
    """`training.jsonl`: one object per line, in the order of the steps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, **values: Any) -> None:
        """Write one report, and show it."""
        line = json.dumps(
            {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}
        )
        with self.path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def forget_after(self, step: int) -> None:
        """Drop what a stopped run reported after it last saved."""
        if self.path.exists():
            lines = [x for x in self.path.read_text().splitlines() if json.loads(x)["step"] < step]
            self.path.write_text("".join(line + "\n" for line in lines))


def train(out: Path) -> Any:
    """Train from where the folder stands to the end, and leave the finished model there."""
    out.mkdir(parents=True, exist_ok=True)
    model = make_model()
    steps = [stage for stage in STAGES for _ in range(stage.steps)]
    own, gates = optimisers(model), Gates(model)
    saved, log = out / "progress.pt", Log(out / "training.jsonl")
    start, seconds = 0, 0.0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        start, seconds = state["step"], state["seconds"]
        model.load_state_dict(state["model"])
        for optimiser, held in zip(own, state["optimisers"], strict=True):
            optimiser.load_state_dict(held)
    log.forget_after(start)
    began = time.monotonic() - seconds
    for step in range(start, len(steps)):
        set_rates(own, step, len(steps))
        guide = GUIDE_WEIGHT * min(1.0, max(0, GUIDE_STEPS - step) / GUIDE_FADE)
        losses = train_step(model, batch_of(step, steps[step]), gates, guide)
        for optimiser in own:
            optimiser.step()
            optimiser.zero_grad()
        seconds = time.monotonic() - began
        if step % REPORT_EVERY == 0:
            log.add(step=step, length=steps[step].length, **losses, seconds=round(seconds))
        if (step + 1) % SAVE_EVERY == 0:
            state = {
                "step": step + 1,
                "seconds": seconds,
                "model": model.state_dict(),
                "optimisers": [optimiser.state_dict() for optimiser in own],
            }
            torch.save(state, saved.with_suffix(".new"))
            os.replace(saved.with_suffix(".new"), saved)
    model = model.eval().to(torch.bfloat16)
    model.save_pretrained(out)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(out)
    model = model.float().eval()
    for length in (512, 1024):
        prompts = [
            recall_prompt(f"held out {number}", kind, length)
            for kind in RECALL_KINDS
            for number in range(HELD_OUT_PROMPTS)
        ]
        kinds = recall(model, prompts, tokenizer).by_kind()
        shares = {kind: share.value for kind, share in kinds.items()}
        log.add(step=len(steps), length=length, prompts=HELD_OUT_PROMPTS, recall=shares)
    return model


def make_tokenizer() -> Any:
    """Words are split at blanks; no word is unknown to the language itself."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(IDS, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<doc>", pad_token="<pad>", padding_side="left"
    )


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the model and the log")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    options = parser.parse_args()
    # Strong decays underflow; without this, steps get twenty times slower as the model learns them.
    torch.set_flush_denormal(True)
    torch.set_num_threads(options.threads)
    train(options.out)


if __name__ == "__main__":
    main()
