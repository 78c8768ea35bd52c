"""What can be chosen, as frozen dataclasses that check themselves. Imports nothing of ours but errors."""

from lightning_zero.config.engine_config import CompileConfig, EngineConfig
from lightning_zero.config.options import Options, RecomputePolicy, Transport, Tuning

__all__ = ["CompileConfig", "EngineConfig", "Options", "RecomputePolicy", "Transport", "Tuning"]
