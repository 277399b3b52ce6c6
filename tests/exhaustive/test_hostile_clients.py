"""An honest client beside attackers, for two minutes."""

from __future__ import annotations

from hostile_clients import left_processes, problems, start, trial


def test_attackers_leave_an_honest_client_its_answers() -> None:
    served = start()
    try:
        found = trial((served.host, served.port), served.process.pid, 100, seed=1)
        assert not problems(found), found
        assert "Traceback" not in served.log
    finally:
        assert left_processes(served) == 0
