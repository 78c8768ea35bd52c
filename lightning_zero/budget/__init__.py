"""One memory budget: what a training may spend of its device, and on what, by seconds lost for each byte saved.

``facts.py`` says what is known of a training, as plain numbers, and ``curve.py`` what its graphs reckon; ``items.py``
what could be done about its memory, and what that costs; ``knapsack.py`` chooses; ``plan.py`` is the choice, for people
and for JSON. All of it is pure: the same numbers give the same plan on every rank. ``compile/budget.py`` measures them,
and ``lightning_zero.plan`` has them on paper.
"""
