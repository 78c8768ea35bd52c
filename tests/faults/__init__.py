"""Inject faults into a training of real processes, and judge the end of the job.

``spec`` names the fault, ``points`` its places and ``actions`` its kinds; ``injector`` acts inside a rank; ``script`` with ``model`` is the training; ``job`` starts the ranks, watches them die and measures; ``verdict``
judges; ``cases`` is the list of faults, and ``table`` runs and prints it: ``python -m tests.faults.table``.
"""
