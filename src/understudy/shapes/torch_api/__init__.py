"""The names that torch gives to these things, and what its C++ and its tools ask.

    names        contexts, constraints, guard_bool and other functions
    environment  what torch's shape functions and tools ask of an environment
"""
