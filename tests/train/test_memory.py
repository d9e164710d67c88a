"""Memory that is freed while training goes back to the system once its holes are large."""

from outpace.train import memory


def test_holes_are_closed_once_they_are_large(monkeypatch):
    sizes, released = iter([100, 150, 201, 120, 220, 221, 130]), []
    monkeypatch.setattr(memory, "resident", lambda: next(sizes))
    monkeypatch.setattr(memory, "release", lambda: released.append(True))
    monkeypatch.setattr(memory.Holes, "MOST", 100)
    holes, told = memory.Holes(), []
    for _ in range(4):
        holes.close()
        told.append(len(released))
    assert told == [0, 1, 1, 2], "as much as it was after the last time, and 100 more"


def test_the_size_of_this_process_is_known_on_linux():
    assert memory.resident() > 1 << 20 or not memory.STATM.exists()
