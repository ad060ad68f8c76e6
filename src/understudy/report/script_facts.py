"""Facts from the runner of a script, for the report."""

from __future__ import annotations

from understudy.report.sanity import RunFacts
from understudy.simulation.scripts import INTERRUPTED, Script, ScriptResult


def take_facts(facts: RunFacts, script: Script, result: ScriptResult, has_margin: bool) -> None:
    facts.program = script.command
    facts.steps = result.steps
    facts.failure = _describe_failure(result)
    facts.is_out_of_memory = result.is_out_of_memory
    facts.writes = [write.to_record() for write in result.writes]
    facts.assumptions += result.notes.notes
    if has_margin:  # the user's own
        facts.assumptions += result.notes.margins
    else:
        facts.margins = result.notes.margins
    facts.warnings, facts.made_up = result.notes.warnings, result.notes.made_up
    facts.programs, facts.optimizers = result.notes.programs, result.optimizers
    facts.least = result.least
    facts.longest_text = result.longest_text


def _describe_failure(result: ScriptResult) -> str:
    if not result.exit_code:
        return ""
    code = f"left with exit code {result.exit_code}"
    how = "was interrupted" if result.exit_code == INTERRUPTED else "failed" if result.error else code
    return (
        f"the script {how} after {result.steps} of its steps"
        if result.steps
        else f"the script {how} in its first step"
    )
