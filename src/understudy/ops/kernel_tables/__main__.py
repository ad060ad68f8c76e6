"""Writes the table of the installed torch to standard output:

python -m understudy.ops.kernel_tables > src/understudy/ops/kernel_tables/cpu-2.13.txt
"""

from __future__ import annotations

import os
import sys

from understudy._torch import operator_named
from understudy.ops.kernel_tables.facts import find_facts
from understudy.ops.kernel_tables.survey import CPU_ISA, KernelAnswers, TableWriter, survey
from understudy.ops.variants import functional_overload


def main(names: list[str]) -> None:
    import torch  # why: after the check of the environment, which decides what its kernels do

    writer = TableWriter()
    answered: dict[str, KernelAnswers] = {}
    crashed: list[str] = []
    for number, (name, answers) in enumerate(survey(names or None)):
        print(f"{number} {name}", file=sys.stderr, flush=True)
        if answers is None:
            crashed.append(name)
        else:
            answered.setdefault(name, answers).merge(answers)
    rows = [writer.row(name, answers) for name, answers in answered.items() if _differs(name, answered)]
    release = ".".join(torch.__version__.split(".")[:2])
    print(f"# What the CPU kernels of torch {release} refuse: for each operator, boxes of signatures.")
    print("# Written by python -m understudy.ops.kernel_tables; see table.py for the format.")
    print(
        f"# Asked: {len(answered)} operators. Kernels that ended their process, without a row: {' '.join(crashed) or 'none'}"
    )
    for fact, holds in find_facts().items():
        print(f"fact {fact} {'yes' if holds else 'no'}")
    for members, name in writer.sets.items():
        print(f"set {name} = {members}")
    for row in sorted(rows):
        if row:
            print(row)


def _differs(name: str, answered: dict[str, KernelAnswers]) -> bool:
    """Whether an operator needs a row: in place, it usually accepts nothing that its functional variant refuses, and the row
    of that is used."""
    functional = functional_overload(operator_named(name))
    row = None if functional is None else answered.get(functional.name().removesuffix(".default"))
    return row is None or any(
        answer is None and row.by_signature.get(signature) is not None
        for signature, answer in answered[name].by_signature.items()
    )


if __name__ == "__main__":
    if os.environ.get("ONEDNN_MAX_CPU_ISA") != CPU_ISA:
        os.environ["ONEDNN_MAX_CPU_ISA"] = CPU_ISA
        os.execv(sys.executable, [sys.executable, "-m", "understudy.ops.kernel_tables", *sys.argv[1:]])
    main(sys.argv[1:])
