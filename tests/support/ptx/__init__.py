"""A software GPU for the tests: executes the PTX that NVRTC makes of the kernels.

    text.py, registers.py, opcodes.py, translate.py   PTX to C++: a resumable function an entry
    build.py, machine.py                              libraries of kernels; machines that run them
    runtime/                                          scheduler, memory, races, virtual time

What it does not show: ptxas, silicon, the overlap of PDL, NVLink's own ordering, forward progress.
"""
