"""Define options and configurations as frozen dataclasses that check themselves."""

from lightning_zero.config.engine_config import CompileConfig, EngineConfig
from lightning_zero.config.options import Options, RecomputePolicy, Transport, Tuning

__all__ = ["CompileConfig", "EngineConfig", "Options", "RecomputePolicy", "Transport", "Tuning"]
