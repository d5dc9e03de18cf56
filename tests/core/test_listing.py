"""Tar files: each is read by one rank, and all ranks know what is in all of them."""

import json
from pathlib import Path

import pytest
from nodes import WORLD
from picture_files import damage, write_folder, write_tars

from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.agreement import broadcast_text
from prunex_mpi.core.listing import share_headers
from prunex_mpi.data import tars


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Return a folder of tar files, the same one on all ranks."""
    root = Path(broadcast_text(WORLD, str(tmp_path)))
    if WORLD.rank == 0:
        write_tars(root / "tars", write_folder(root / "pictures", train=6, test=2))
    WORLD.Barrier()
    return root / "tars"


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_each_tar_file_is_read_by_one_rank(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, mine = tars.read_headers, []

    def noted(path: str, going: object) -> tars.Headers:
        mine.append(path)
        return real(path, going)

    monkeypatch.setattr(tars, "read_headers", noted)
    found = share_headers(WORLD, "webdataset", str(shards), Heartbeat())
    paths = sorted(map(str, shards.glob("*/*.tar")))
    assert sorted(found) == paths
    assert found == {path: real(path, lambda: None) for path in paths}
    texts = [broadcast_text(WORLD, json.dumps(mine), root) for root in range(WORLD.size)]
    assert sorted(path for text in texts for path in json.loads(text)) == paths
    assert share_headers(WORLD, "imagefolder", str(shards), Heartbeat()) == {}


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_what_one_rank_cannot_read_ends_all(shards: Path) -> None:
    path = shards / "train/0007.tar"
    if WORLD.rank == 0:
        damage(path)
    WORLD.Barrier()
    with pytest.raises(UserError, match=f"cannot read tar file {path}") as caught:
        share_headers(WORLD, "webdataset", str(shards), Heartbeat())
    assert caught.value.exit_code == UNREADABLE
