"""Settings, from the environment. What is no number or no known word is a clear error; below a floor is raised."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated, Any, Literal

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict
from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

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
    "switch_queries": 20,
}
OPTIONAL = (
    "database_url",
    "url",
    "query_url",
    "api_key",
    "ca_bundle",
    "proxy",
    "requests_per_minute",
    "tokens_per_minute",
    "model",
    "dimensions",
    "active_protocol",
    "active_url",
    "active_query_url",
    "active_api_key",
    "active_model",
    "active_dimensions",
    "active_prefix_by",
    "search_feed_seconds",
    "alert_webhook",
)


class Settings(BaseSettings):
    """One field is one variable: EMBED_ and the field's name; DATABASE_URL stands alone."""

    model_config = SettingsConfigDict(env_prefix="EMBED_", extra="ignore", frozen=True, allow_inf_nan=False)

    database_url: SecretStr | None = Field(None, validation_alias="DATABASE_URL")
    home: Path = Path(".embed_assets")
    corpora: str = "embed_assets.corpora.jobs:jobs"
    protocol: Literal["local", "tei", "hf", "openai"] = "local"
    # Addresses may hold a user's password or a token.
    url: str | None = Field(None, repr=False)
    query_url: str | None = Field(None, repr=False)
    api_key: SecretStr | None = None
    headers: Annotated[dict[str, SecretStr], NoDecode] = Field({}, validate_default=False)
    ca_bundle: Path | None = None
    proxy: SecretStr | None = None
    requests_per_minute: float | None = Field(None, gt=0)
    tokens_per_minute: float | None = Field(None, gt=0)
    model: str | None = None
    dimensions: int | None = Field(None, ge=1, le=16000)
    prefix_by: Literal["client", "server"] = "client"
    active_protocol: Literal["local", "tei", "hf", "openai"] | None = None
    active_url: str | None = Field(None, repr=False)
    active_query_url: str | None = Field(None, repr=False)
    active_api_key: SecretStr | None = None
    active_model: str | None = None
    active_dimensions: int | None = Field(None, ge=1, le=16000)
    active_prefix_by: Literal["client", "server"] | None = None
    switch: Literal["automatic", "operator"] = "automatic"
    switch_missing_percent: float = Field(1, ge=0, le=100)
    switch_dead_percent: float = Field(1, ge=0, le=100)
    switch_recall_percent: float = Field(95, ge=0, le=100)
    switch_queries: int = 200
    rollback_days: float = Field(7, ge=0)
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
    fresh_seconds: float = Field(900, gt=0)
    search_feed_seconds: float | None = Field(None, gt=0)
    alert_webhook: SecretStr | None = None

    @field_validator("headers", mode="before")
    @classmethod
    def _read_headers(cls, value: Any) -> Any:
        """A JSON object. No part of it stands in the error: header values are secrets more often than not."""
        if not isinstance(value, str):
            return value
        try:
            found = json.loads(value or "{}")
        except ValueError:
            found = None
        if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
            raise ValueError('must be a JSON object of texts, like {"X-Team": "search"}')
        return found

    @field_validator(*OPTIONAL, mode="before")
    @classmethod
    def _empty_is_unset(cls, value: Any) -> Any:
        return None if value == "" else value

    @field_validator("database_url", mode="after")
    @classmethod
    def _is_an_address(cls, value: SecretStr | None) -> SecretStr | None:
        try:
            conninfo_to_dict(value.get_secret_value() if value else "")
        except ProgrammingError:
            raise ValueError(
                "this is no address of Postgres; write postgresql://user:password@host/database, with what is special "
                "in the password escaped (% as %25, @ as %40)"
            ) from None
        return value

    @field_validator(*FLOORS, mode="after")
    @classmethod
    def _raise_to_floor(cls, value: float, info: Any) -> float:
        floor = FLOORS[info.field_name]
        if value < floor:
            logger.warning("EMBED_%s=%s is below its floor; %s is used", info.field_name.upper(), value, floor)
            return floor
        return value

    def of_active(self) -> Settings | None:
        """These settings with the embedder of EMBED_ACTIVE_*, or None when EMBED_ACTIVE_PROTOCOL is not set."""
        if self.active_protocol is None:
            return None
        return self.model_copy(
            update={
                "protocol": self.active_protocol,
                "url": self.active_url,
                "query_url": self.active_query_url,
                "api_key": self.active_api_key,
                "model": self.active_model,
                "dimensions": self.active_dimensions,
                "prefix_by": self.active_prefix_by or "client",
                "headers": {},  # they may hold what only the other endpoint may see
                "requests_per_minute": None,
                "tokens_per_minute": None,
            }
        )

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
