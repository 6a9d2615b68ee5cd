"""What memory is used for, by the function that asked for it.

A dry run has to say what a peak is made of, and the code that makes it has nothing to do with
that. So components are told by functions: that of the innermost function of the package, named
here, that was running when a tensor was made.
"""

from __future__ import annotations

from pathlib import Path
from types import CodeType

PACKAGE = Path(__file__).parents[1]

ADDON = "add-on"
BEST = "best weights kept"
SUMS = "sums over the text"
SOLVING = "solving"
OPTIMISER = "optimiser"
GRADIENTS = "gradients"
TEACHER = "plain model's pass"
STUDENT = "folded model's pass"
BACKWARD = "backward pass"
LOSS = "logits and loss"
ATTENTION = "attention of layers"
ROWS = "rows' activations"
SCALES = "measuring scales"
MEASURING = "measuring"

FUNCTIONS = {
    "fitting/gram.py": {
        "": SUMS,
        "covariance": SOLVING,
        "cross_covariance": SOLVING,
        "times": SOLVING,
        "omega": SOLVING,
        "centred_product": SOLVING,
    },
    "fitting/tasks.py": {"": SUMS, "solve": SOLVING},
    "fitting/components.py": {"": SOLVING},
    "fitting/ridge.py": {"": SOLVING},
    "fitting/closed_form.py": {"_activations": ROWS},
    "fitting/weight_scales.py": {"": SCALES},
    "fitting/scaled_adam.py": {"": OPTIMISER},
    "fitting/distil_loss.py": {"": LOSS},
    "fitting/distil.py": {"_learn": BACKWARD, "_look": BEST, "__init__": BEST, "_start": SCALES},
    "fitting/refine.py": {"looked": BEST, "_captured": ROWS, "_look": ROWS},
    "fitting/gates.py": {"train_gates": ROWS, "_scale_to_inputs": SCALES},
    "fitting/attention_output.py": {"": ATTENTION},
    "fitting/descent.py": {"step": BACKWARD, "": ATTENTION},
    "runtime/student.py": {"": STUDENT},
    "runtime/capture.py": {"": TEACHER},
    "store/addon.py": {"": ADDON},
    "evaluation/runner.py": {"": MEASURING},
    "fitting/held_out.py": {"": MEASURING},
}
"""By file: components of functions by name, and under no name that of all others there."""


def component_of(code: CodeType) -> str | None:
    """What a function makes tensors for; None where whoever called it knows better."""
    path = Path(code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return None
    named = FUNCTIONS.get(path.relative_to(PACKAGE).as_posix(), {})
    return named.get(code.co_name, named.get(""))
