"""Rules: what each operator does, as pure functions on specs. One file for each family of operators.

Every file of this package registers its rules when it is imported, and all of them are imported here.
"""

import importlib
import pkgutil

from understudy.rules.registry import Rule, full_name, rule, rule_of, user_rule, user_rules

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Rule", "full_name", "rule", "rule_of", "user_rule", "user_rules"]
