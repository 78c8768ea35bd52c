"""Integrate the engine with Lightning: ``trainer/`` and ``fabric/`` hold the strategies."""
