"""Settings, from the environment. What is no number or no known word is a clear error; below a floor is raised."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from embed_assets.errors import ConfigurationError

logger = logging.getLogger(__name__)

FLOORS = {
    "batch_size": 1,
    "concurrency": 1,
    "request_items": 1,
    "lease_seconds": 10,
    "max_attempts": 1,
    "waves_per_run": 1,
    "drains_in_flight": 1,
}


class Settings(BaseSettings):
    """One field is one variable: EMBED_ and the field's name; DATABASE_URL stands alone."""

    model_config = SettingsConfigDict(env_prefix="EMBED_", extra="ignore", frozen=True, allow_inf_nan=False)

    database_url: SecretStr | None = Field(None, validation_alias="DATABASE_URL")
    home: Path = Path(".embed_assets")
    corpora: str = "embed_assets.corpora.jobs:jobs"
    protocol: Literal["local", "tei", "hf", "openai"] = "local"
    url: str | None = None
    query_url: str | None = None
    api_key: SecretStr | None = None
    model: str | None = None
    dimensions: int | None = Field(None, ge=1, le=16000)
    prefix_by: Literal["client", "server"] = "client"
    batch_size: int = 500
    concurrency: int = 1
    request_items: int = 32
    call_timeout_seconds: float = 600
    attempt_timeout_seconds: float = Field(60, gt=0)
    lease_seconds: float = 120
    max_attempts: int = 3
    waves_per_run: int = 8
    run_seconds: float = Field(60, gt=0)
    drains_in_flight: int = 2
    sensor_wait_seconds: float = Field(24, ge=0)
    retention_days: float = 14
    reconcile_seconds: float = Field(3600, gt=0)

    @field_validator("database_url", "url", "query_url", "api_key", "model", "dimensions", mode="before")
    @classmethod
    def _empty_is_unset(cls, value: Any) -> Any:
        return None if value == "" else value

    @field_validator(*FLOORS, mode="after")
    @classmethod
    def _raise_to_floor(cls, value: float, info: Any) -> float:
        floor = FLOORS[info.field_name]
        if value < floor:
            logger.warning("EMBED_%s=%s is below its floor; %s is used", info.field_name.upper(), value, floor)
            return floor
        return value

    @property
    def home_path(self) -> Path:
        return self.home.expanduser().resolve()


def load_settings(**overrides: Any) -> Settings:
    """The settings in force. Raises ConfigurationError naming each variable that cannot be read."""
    try:
        return Settings(**overrides)
    except ValidationError as error:
        raise ConfigurationError(_explain(error)) from None


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        name = str(problem["loc"][0]).upper()
        variable = name if name.startswith(("DATABASE_URL", "EMBED_")) else f"EMBED_{name}"
        lines.append(f"{variable}: {problem['msg'].lower()}")
    return f"The environment holds settings that cannot be used: {'; '.join(lines)}. Correct or unset them."
