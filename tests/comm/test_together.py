import errno

import pytest

from mpishard.comm.threads import run
from mpishard.comm.together import on_rank_zero, same_on_all_ranks, together
from mpishard.errors import ConfigError, EngineError


def messages(main, ranks=3):
    def caught(comm):
        with pytest.raises(ConfigError) as error:
            main(comm)
        comm.barrier()
        return str(error.value)

    return run(ranks, caught)


def test_what_one_rank_fails_at_all_fail_at():
    def main(comm):
        def action():
            if comm.rank == 2:
                raise ConfigError("rank two is wrong")

        together(comm, action)

    assert messages(main) == ["rank two is wrong"] * 3


def test_a_system_error_is_told_in_words():
    def main(comm):
        together(comm, lambda: open("/nowhere/at/all").close())

    told = "/nowhere/at/all: No such file or directory; choose a place that can be read and written"
    assert messages(main) == [told] * 3


def test_memory_that_is_not_there_is_no_matter_of_places():
    def main(comm):
        def action():
            if comm.rank == 1:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")

        together(comm, action)

    told = "Cannot allocate memory; raise the limit of this process's memory (ulimit -v), or use less of it"
    assert messages(main) == [told] * 3


def test_rank_zero_alone_acts():
    acted = []
    assert run(3, lambda comm: on_rank_zero(comm, lambda: acted.append(comm.rank) or "done")) == ["done", None, None]
    assert acted == [0]


def test_a_bug_passes_through():
    def main(comm):
        def action():
            if comm.rank == 1:
                raise EngineError("a bug")

        together(comm, action)

    with pytest.raises(EngineError, match="a bug"):
        run(2, main)


def test_equal_lines_pass():
    run(3, lambda comm: same_on_all_ranks(comm, ["a = 1", "b = ü"]))


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["a = 1", "b = 3"], "rank 1 has b = 3, rank 0 has b = 2;"),
        (["a = 1"], "rank 1 has nothing more, rank 0 has b = 2;"),
        (["a = 1", "b = 2", "c = 3"], "rank 1 has c = 3, rank 0 has nothing more;"),
    ],
)
def test_the_first_difference_is_named(lines, told):
    found = messages(lambda comm: same_on_all_ranks(comm, lines if comm.rank == 1 else ["a = 1", "b = 2"]))
    assert all(message.startswith(told) for message in found)
