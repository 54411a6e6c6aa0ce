"""Tests settings of a run with a gateway that are refused before anything starts."""

from __future__ import annotations

import pytest

from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.control.engine_set import limits_of


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.autoscaler.enabled=true", "mode=colocate"], "with mode=colocate, because its engines are fixed"),
        (["engine.autoscaler.enabled=true", "gateway=none"], "with gateway=none: it orders engines through"),
        (["gateway.host=example.org"], "gateway.host=example.org is no IPv4 address"),
        (["gateway.host=::1"], "gateway.host=::1 is no IPv4 address"),
        (["gateway.port=65536"], "gateway.port=65536"),
        (["gateway.allowed_hosts=['http://gpu7']"], "which is no host name"),
        (["gateway.allowed_hosts=['gpu7:7788']"], "which is no host name"),
        (["engine.elastic.allowed_hosts=['http://gpu7']"], "engine.elastic.allowed_hosts"),
    ],
)
def test_an_unreachable_gateway_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(["gateway=local", *overrides])
    assert message in str(refused.value)


def test_a_gateway_may_listen_outside_of_loopback_and_gateway_none_checks_nothing() -> None:
    config = load_config(["gateway=local", "gateway.host=10.0.0.5", "gateway.allowed_hosts=[gpu7.cluster]"])
    assert config.gateway.allowed_hosts == ["gpu7.cluster"]
    assert load_config(["gateway=none", "gateway.host=nowhere"]).gateway.name == "none"


def test_a_run_may_begin_with_more_engines_than_are_added() -> None:
    config = load_config(["engine.count=3", "engine.elastic.max_count=2"])
    assert config.gateway.name == "local" and limits_of(config).most == 3
