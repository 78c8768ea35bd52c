"""Divide device memory among activations, unsharded weights and optimizer state.

``inputs.py`` holds the measured numbers, ``choices.py`` the alternatives with their bytes and seconds, and
``memory_plan.py`` picks among them. These are pure functions: equal numbers give equal plans on every rank.
``planner.py`` measures a training and decides; ``step/memory_controller.py`` applies its decisions.
"""
