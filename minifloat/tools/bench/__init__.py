"""The benchmark: ``minifloat bench`` measures us beside plain torch, torchao and Transformer Engine, in one run.

``registry`` says what there is to measure (rows are fixed in tables such as that of ``linear``), ``gate`` what is
right, ``measure`` how time is taken, ``run`` goes through it, ``summary`` draws the conclusions, ``report`` and
``plots`` write them down, ``against`` compares two revisions. See ``docs/benchmarks.md``.
"""
