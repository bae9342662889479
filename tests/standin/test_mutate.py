from __future__ import annotations

import io

import numpy as np
import pytest

from tests.standin import Trace, installed, mutate
from tests.standin.small import Pair, put


def recorded(program, **settings):
    trace = Trace()
    with installed(trace, **settings):
        program(trace)
    return trace


def test_each_order_of_a_pipeline_is_needed():
    trace = recorded(lambda trace: Pair(trace).run(4))
    rows = {(row.kind, row.instances): row.exposes for row in mutate.table([trace])}
    lost = {
        ("stream wait", 4): ("batch+0", "copy host to device (write)", "add (read)"),
        ("stream wait", 3): ("batch+0", "add (read)", "copy host to device (write)"),
        ("event synchronise", 3): ("pinned batch+0", "copy host to device (read)", "host write"),
    }
    for key, words in lost.items():
        assert all(word in rows[key] for word in words), rows[key]
    assert len([row for row in mutate.table([trace]) if row.kind == "event record" and row.exposes]) == 3


def test_an_order_too_many_survives():
    def program(trace):
        import cupy

        pair = Pair(trace)
        pair.run(2)
        extra = cupy.cuda.Event(disable_timing=True)
        extra.record(pair.compute)
        pair.copies.wait_event(extra)

    survivors = mutate.survivors([recorded(program)])
    assert {row.kind for row in survivors if "test_mutate.py" in row.site} == {"event record", "stream wait"}


def test_what_one_run_does_not_need_another_may():
    once, often = (recorded(lambda trace, n=n: Pair(trace).run(n)) for n in (1, 3))
    needed = {(row.site, row.kind) for row in mutate.table([once]) if row.exposes}
    both = mutate.table([once, often])
    assert needed < {(row.site, row.kind) for row in both if row.exposes}


def test_uses_of_one_place_can_be_told_apart():
    """What is waited for inside a function of mpishard/ is needed by one of its callers and not by the other."""
    trace = recorded(lambda trace: Pair(trace).run(2))
    for number, (letter, agent, host, what, site) in enumerate(trace.items):
        if site >= 0:
            used = trace.sites[site]
            caller = "first.py:1" if number < len(trace.items) / 2 else "second.py:2"
            trace.sites.append(((*used[0], caller), used[1]))
            trace.items[number] = (letter, agent, host, what, len(trace.sites) - 1)
    assert [row[:3] for row in mutate.table([trace])] == sorted(row[:3] for row in mutate.table([trace]))
    split = mutate.table([trace], paths=True)
    assert len(split) > len(mutate.table([trace])) and all(".py:" in row.site.split(" < ")[1] for row in split)
    assert sum(row.instances for row in split) == sum(row.instances for row in mutate.table([trace]))
    assert not all(row.exposes for row in split)


def test_a_record_that_is_not_ordered_is_refused():
    with pytest.raises(ValueError, match=r"not ordered as it stands: batch\+0"):
        mutate.table([recorded(lambda trace: Pair(trace, "used").run())])


def test_leaving_out_the_record_of_an_event_leaves_it_where_it_was():
    """The second wait is for the first record then, which is too early."""

    def program(trace):
        import cupy

        one, two = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        x, event = put(np.ones(4, np.float32), one), cupy.cuda.Event(disable_timing=True)
        event.record(one)
        cupy.cuda.runtime.memsetAsync(x.data.ptr, 0, 16, one.ptr)
        event.record(one)
        two.wait_event(event)
        cupy.cuda.runtime.memsetAsync(x.data.ptr, 0, 16, two.ptr)
        two.synchronize()

    first, second = (row for row in mutate.table([recorded(program)]) if row.kind == "event record")
    assert "SURVIVES" not in second.exposes and "memset" in second.exposes and not first.exposes


def test_the_table_is_printed_and_long_records_are_no_burden():
    trace = recorded(lambda trace: Pair(trace).run(300))
    assert len(trace.items) > 3000
    rows = mutate.table([trace])
    file = io.StringIO()
    mutate.print_table(rows, file)
    assert file.getvalue().count("\n") == 2 * len(rows)
