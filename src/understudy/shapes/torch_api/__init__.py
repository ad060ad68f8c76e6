"""Torch's names for these things, and what its C++ code and its tools call.

names        contexts, constraints, guard_bool and other functions
guard_texts  guards as code in torch's notation
environment  methods of an environment that torch's shape functions and tools call
foreign_symbols  functions that are given symbols of torch's own environment
"""
