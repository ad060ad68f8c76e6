"""Options of `understudy run` about time: limits, the host, and the cost of a whole run."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from understudy.cli.tables import parse_seconds
from understudy.errors import UnderstudyError
from understudy.timing.curves import list_hosts
from understudy.timing.step_time import run_cost

if TYPE_CHECKING:
    from understudy.report.cluster_rehearsal import ClusterRehearsal
    from understudy.report.rehearsal import Rehearsal


class TimeOptionError(UnderstudyError, ValueError):
    """Wrong input."""


def add_time_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--max-step-time", metavar="TIME", type=_parse_limit,
        help="limit for the time of a step, as in 0.5s; exit code 3 above it",
    )  # fmt: skip
    add(
        "--host",
        metavar="KIND",
        help=f"host of the card: {', '.join(list_hosts())} (default: the usual one)",
    )
    add(
        "--per-step", metavar="N", type=_parse_count,
        help="samples per step, if they can't be derived from the inputs of the model",
    )  # fmt: skip
    add(
        "--total-steps",
        metavar="N",
        type=_parse_count,
        help="steps of the whole run, for hours and card-hours",
    )
    add("--total-tokens", metavar="N", type=_parse_amount, help="the same by tokens, as in 300e9")
    add(
        "--cost",
        metavar="PRICE",
        type=_parse_price,
        help="price of a card-hour, as in 2.49/h, for the cost of the whole run",
    )


def _parse_limit(text: str) -> float:
    try:
        return parse_seconds(text)
    except UnderstudyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parse_amount(text: str) -> float:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number such as 300e9, got {text!r}")
    return value


def _parse_count(text: str) -> int:
    amount = _parse_amount(text)
    if amount != int(amount):
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(amount)


def _parse_price(text: str) -> float:
    return _parse_amount(text.strip().removesuffix("/h"))


def check_time_options(options: argparse.Namespace) -> None:
    """Before torch is imported."""
    if options.host is not None and options.host not in list_hosts():
        raise TimeOptionError(
            f"--host: invalid choice {options.host!r} (choose from {', '.join(list_hosts())})"
        )
    if options.cost is not None and options.total_steps is None and options.total_tokens is None:
        raise TimeOptionError("--cost requires --total-steps or --total-tokens")


def add_cost(options: argparse.Namespace, rehearsal: Rehearsal | ClusterRehearsal, cards: int) -> None:
    """Add the cost of the whole run, if its length is known."""
    time, steps = rehearsal.time, options.total_steps
    if time is not None and options.total_tokens is not None:
        if not time.tokens_per_second:
            raise TimeOptionError("--total-tokens: the inputs of the model are not tokens; use --total-steps")
        steps = round(options.total_tokens / (time.tokens_per_second * time.seconds_per_step))
    if time is not None and steps is not None:
        rehearsal.time = replace(time, cost=run_cost(time, steps, cards, options.cost))


def is_too_slow(options: argparse.Namespace, rehearsal: Rehearsal | ClusterRehearsal) -> bool:
    """Whether a step exceeds --max-step-time. A limit that can't be checked is not passed in silence."""
    limit, time = options.max_step_time, rehearsal.time
    if limit is None:
        return False
    if time is None:
        print(
            "understudy run: --max-step-time was not checked: the run has no time estimate", file=sys.stderr
        )
        return False
    if time.seconds_per_step > limit:
        print(f"understudy run: a step takes longer than {limit:g} s", file=sys.stderr)
        return True
    return False
