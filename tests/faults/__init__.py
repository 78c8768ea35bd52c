"""Faults that are put into a training of real processes, and what then becomes of the job.

``spec`` says what goes wrong; ``points`` where that can be, ``actions`` what it can be, and ``injector`` does it inside a
rank; ``script`` with ``model`` is the training; ``job`` starts the ranks, watches them die and measures; ``verdict``
judges; ``cases`` is the list of faults, and ``table`` runs and prints it: ``python -m tests.faults.table``.
"""
