"""`embed-assets fake-server`: rehearse an outage of the embedding endpoint."""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer

from embed_assets.errors import ConfigurationError
from embed_assets.fake_server.answers import VALIDATION
from embed_assets.fake_server.faults import FAULTS, Fault
from embed_assets.fake_server.server import FakeServer

KEY = "FAKE_SERVER_API_KEY"
REPORT_SECONDS = 5.0


def fake_server(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8090,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    dimensions: Annotated[int, typer.Option(min=1, max=16000)] = 768,
    model: Annotated[str, typer.Option(help="The name it gives itself.")] = "stub/model",
    speaks: Annotated[str, typer.Option(help=f"Whose errors: {', '.join(VALIDATION)}.")] = "tei-1.9",
    fault: Annotated[
        list[str] | None, typer.Option("--fault", help="name, name=0.1 (a tenth of the requests) or name@word; often.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed, the same faults.")] = 0,
    latency: Annotated[float, typer.Option(min=0, help="Seconds a request takes.")] = 0.0,
    per_text: Annotated[float, typer.Option(min=0, help="Seconds more for each text.")] = 0.0,
    one_at_a_time: Annotated[bool, typer.Option("--one-at-a-time", help="Requests queue, as for a GPU.")] = False,
    max_items: Annotated[int | None, typer.Option(min=1, help="Texts a request may hold.")] = None,
    max_bytes: Annotated[int | None, typer.Option(min=1, help="Bytes a request may hold.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens a text may have.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    minute: Annotated[float, typer.Option(min=0.1, help="How many seconds a minute of these lasts.")] = 60.0,
    warming: Annotated[float, typer.Option(min=0, help="Seconds of 503 after the first request.")] = 0.0,
    list_faults: Annotated[bool, typer.Option("--list-faults", help="Print the names for --fault and end.")] = False,
) -> None:
    """An embedding server that fails on command, to rehearse an outage. A key to insist on: FAKE_SERVER_API_KEY."""
    if list_faults:
        for name, meaning in {**FAULTS, "503": "any status from 300 to 599"}.items():
            typer.echo(f"{name:20} {meaning}")
        return
    if speaks not in VALIDATION:
        raise ConfigurationError(f"--speaks {speaks}: known are {', '.join(VALIDATION)}")
    server = FakeServer(
        port=port,
        host=host,
        dimensions=dimensions,
        model=model,
        speaks=speaks,
        faults=[Fault.parse(given) for given in fault or []],
        seed=seed,
        seconds_per_request=latency,
        seconds_per_text=per_text,
        one_at_a_time=one_at_a_time,
        max_items=max_items,
        max_bytes=max_bytes,
        max_tokens=max_tokens,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        minute=minute,
        warming_seconds=warming,
        api_key=os.environ.get(KEY),
    )
    try:
        _serve(server)
    except OSError as error:
        raise ConfigurationError(
            f"Port {port} of {host} cannot be used ({error.strerror}). Choose another with --port; 0 takes a free one."
        ) from None


def _serve(server: FakeServer) -> None:
    """Until interrupted; says every few seconds what came in. Texts are counted and let go."""
    with server:
        for protocol, url in (("tei", server.url), ("openai", server.openai_url), ("hf", server.hf_url)):
            typer.echo(f"EMBED_PROTOCOL={protocol} EMBED_URL={url} EMBED_MODEL={server.model}")
        requests = texts = 0
        try:
            while not server.stopping.is_set():
                time.sleep(REPORT_SECONDS)
                seen = len(server.requests)
                come = server.requests[:seen]
                del server.requests[:seen]
                requests, texts = requests + seen, texts + sum(len(one.texts) for one in come)
                if seen:
                    met = ", ".join(f"{times} {name}" for name, times in sorted(server.met.items(), key=str))
                    typer.echo(f"{requests} requests, {texts} texts; {server.in_flight} in flight; {met or 'no fault'}")
        except KeyboardInterrupt:
            typer.echo(f"{requests + len(server.requests)} requests")
