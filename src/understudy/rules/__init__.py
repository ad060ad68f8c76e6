"""Rules: what each operator does, as pure functions on specs. One file for each family of operators."""

from understudy.rules.registry import Rule, rule, rule_of, user_rule

__all__ = ["Rule", "rule", "rule_of", "user_rule"]
