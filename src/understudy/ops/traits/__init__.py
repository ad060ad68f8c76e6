"""Facts about operators that other rooms ask for, one module for each.

    devices      which device a call happens on, which calls may mix devices
    rare_dtypes  dtypes that the CPU computes little with
    effects      what a call writes, whether it draws random numbers
    autocast     which dtype autocast casts to
"""
