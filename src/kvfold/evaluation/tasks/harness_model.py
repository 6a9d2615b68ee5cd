"""The model `kvfold` of lm-eval: its own Hugging Face model, with an add-on on it.

Everything but what an add-on changes is the harness's: prompts, tokens, batches, stops. What an
add-on changes is how a prompt is read. Where one forward over context and continuation would not
see what decoding sees (prefill: skip, or prefill_attention: exact), the context is prefilled as
the plan says and the continuation scored on the cache that it leaves.

lm-eval looks models up in a registry that only imports fill, so this module must be imported
first: `kvfold lm-eval` does, and hands all else on to lm-eval's own command line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvfold.errors import EvaluationError, MissingExtraError
from kvfold.evaluation.candidates import with_plan
from kvfold.evaluation.continuation import decoding_chunk, one_forward_is_enough
from kvfold.evaluation.continuation_scores import continuation_scores
from kvfold.evaluation.tasks.harness_hints import without_hints
from kvfold.models import DEFAULT_MODEL, load
from kvfold.plan import Plan
from kvfold.runtime.attach import attach, attachment_of
from kvfold.store.addon import AddOn

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise MissingExtraError(
        f"tasks of the evaluation harness need lm-eval, which can't be imported ({error}); "
        "install the extra with pip install 'kvfold[eval]'"
    ) from error

PLAN_KEYS = ("anchors", "window", "prefill", "prefill_attention", "replay", "resident")
"""Keys of an add-on's plan that `--model_args` may change."""

HARNESS_KEYS = (
    "add_bos_token",
    "batch_size",
    "chat_template_args",
    "enable_thinking",
    "logits_cache",
    "max_batch_size",
    "max_length",
    "prefix_token_id",
    "softmax_dtype",
    "think_end_token",
    "truncation",
)
"""Arguments that are the harness's own; those that say how to load a model are not among them."""

Request = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("kvfold")
class KvfoldLM(HFLM):  # type: ignore[misc]  # lm-eval has no types
    """A causal model with an add-on attached, or plain, as lm-eval sees it.

    pretrained: what `kvfold.models.load` takes, or a model, to which an add-on may be attached
    already. addon: a folder, one that comes with kvfold, or a hub id. tokenizer: needed with a
    model. Further: keys of the plan to change (`PLAN_KEYS`), and lm-eval's own (`HARNESS_KEYS`).

    Raises `EvaluationError` for other arguments, and what loading and attaching raise.
    """

    def __init__(
        self,
        pretrained: Any = DEFAULT_MODEL,
        addon: str | None = None,
        tokenizer: Any = None,
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        changes = {key: options.pop(key, None) for key in PLAN_KEYS}
        _check_options(options, changes, addon)
        if isinstance(pretrained, str | Path):
            pretrained, own = load(pretrained, dtype=_dtype(dtype), device=_device(device))
            tokenizer = own if tokenizer is None else tokenizer
        elif tokenizer is None:
            raise EvaluationError("a model that is loaded already needs its tokenizer beside it")
        with without_hints("lm_eval.models.huggingface"):
            super().__init__(pretrained=pretrained, tokenizer=tokenizer, **options)
        if addon is not None:
            fitted = AddOn.from_pretrained(addon)
            fitted.check_base(pretrained)
            fitted.to(dtype=pretrained.dtype, device=pretrained.device)
            attach(pretrained, with_plan(fitted, **changes))
        if str(self.batch_size).startswith("auto") and not one_forward_is_enough(self.plan):
            raise EvaluationError(
                "a plan of prefill: skip or prefill_attention: exact needs a batch size that is a "
                f"number; got batch_size={self.batch_size}, whose trial runs ask for logits of "
                "whole prompts; name one, such as batch_size=8"
            )

    @property
    def plan(self) -> Plan | None:
        """The plan under which the add-on is attached, None for a plain model."""
        attachment = attachment_of(self.model)
        return None if attachment is None else attachment.plan

    def _loglikelihood_tokens(
        self,
        requests: list[Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """(log-probability, whether greedy) of each request's continuation, in order."""
        plan = self.plan
        if plan is None or one_forward_is_enough(plan):
            found: list[tuple[float, bool]] = super()._loglikelihood_tokens(
                requests, disable_tqdm=disable_tqdm, override_bs=override_bs
            )
            return found
        return self._scores_on_cache(requests, plan, override_bs or int(self.batch_size))

    def _scores_on_cache(
        self, requests: list[Request], plan: Plan, batch: int
    ) -> list[tuple[float, bool]]:
        """Longest first, as the harness orders them, so that rows of a batch are nearly equal."""
        order = sorted(
            range(len(requests)), key=lambda n: -len(requests[n][1]) - len(requests[n][2])
        )
        answers: dict[int, tuple[float, bool]] = {}
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            scores = continuation_scores(
                self.model,
                [self._pair(*requests[n][1:]) for n in chosen],
                chunk=decoding_chunk(plan),
                dtype=self.softmax_dtype,
            )
            for n, score in zip(chosen, scores, strict=True):
                answers[n] = (score.log_probability, score.greedy)
                if requests[n][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[n][0], answers[n])
        return [answers[n] for n in range(len(requests))]

    def _pair(
        self, context: list[int], continuation: list[int]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Context and continuation, the first cut from its left to what the model can hold."""
        room = int(self.max_length) + 1 - len(continuation)
        return context[-max(room, 1) :], continuation


def command_line(arguments: Sequence[str]) -> None:
    """Run lm-eval's own command line, which knows the model now; it may exit."""
    from lm_eval.__main__ import cli_evaluate

    before = sys.argv
    sys.argv = ["lm-eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before


def _check_options(options: dict[str, Any], changes: dict[str, Any], addon: str | None) -> None:
    unknown = sorted(set(options) - set(HARNESS_KEYS))
    if unknown:
        raise EvaluationError(
            f"the model kvfold takes pretrained, addon, tokenizer, dtype, device, "
            f"{', '.join((*PLAN_KEYS, *HARNESS_KEYS))}; got {', '.join(unknown)}; leave it out"
        )
    given = [key for key, value in changes.items() if value is not None]
    if given and addon is None:
        raise EvaluationError(
            f"{', '.join(given)} change an add-on's plan; name the add-on as well, or leave out"
        )


def _device(name: str | None) -> str | None:
    """The device to load on, None for what is there.

    lm-eval's command line names cuda:0 where nobody has named any; its own models take what is
    there then, and so does this one.
    """
    named_cuda = name is not None and name.startswith("cuda")
    return None if named_cuda and not torch.cuda.is_available() else name


def _dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    if name is None or name == "auto":
        return None
    if isinstance(name, torch.dtype):
        return name
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise EvaluationError(f"dtype must be float32, bfloat16 or float16; got {name!r}")
    return found
