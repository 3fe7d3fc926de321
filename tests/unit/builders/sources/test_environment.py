"""B11: what is read does not depend on locale, time zone, hash seed, umask or working directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dsec_layers import proc
from tests.kit.tars import directory, file, hard_link, make_tar, symlink

_PROGRAM = """
import hashlib, os, sys
os.umask(int(sys.argv[1], 8))
os.chdir(sys.argv[2])
from dsec_layers.builders.sources.detect import detect
class Sink:
    def __init__(self): self.seen = hashlib.sha256()
    def whole(self, inode, data): self.seen.update(b"%d %d|" % (len(data), inode.mtime) + bytes(data))
    def stream(self, inode, size, pieces): [self.seen.update(b"%d" % piece if isinstance(piece, int) else piece) for piece in pieces]
for source in sys.argv[3:]:
    sink = Sink()
    for path, inode in detect(source).ingest(sink).walk():
        value = (path, inode.mode, inode.uid, inode.gid, inode.mtime, inode.mtime_ns, inode.rdev, inode.size, inode.xattrs, inode.data)
        sink.seen.update(repr(value).encode())
    print(sink.seen.hexdigest())
"""


def test_b11_environment_does_not_matter(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "é").mkdir(parents=True)
    (tree / "é/日本").write_bytes(b"1")
    Path(os.fsdecode(os.fsencode(tree) + b"/\xff\xfe")).write_bytes(b"2" * (2 << 20))
    (tree / "link").symlink_to("é")
    for name in ("user.b", "user.a", "user.é"):
        os.setxattr(tree / "é", name, name.encode())
    archive = tmp_path / "a.tar"
    archive.write_bytes(
        make_tar(
            directory("é", mode=0o777),
            file("é/日本", b"1", mtime=5),
            file("\udcff\udcfe", b"2"),
            hard_link("h", "\udcff\udcfe"),
            symlink("s", "é"),
        )
    )
    answers = set()
    for number, (lang, zone, seed, mask) in enumerate(
        [
            ("C.UTF-8", "UTC", "0", "022"),
            ("C", "Asia/Tokyo", "1", "077"),
            ("POSIX", "America/New_York", "12345", "000"),
            ("xx_XX.ISO-8859-1", "", "7", "777"),
        ]
    ):
        env = {
            "LANG": lang,
            "LC_ALL": lang,
            "TZ": zone,
            "PYTHONHASHSEED": seed,
            "PYTHONUTF8": "0",
            "PYTHONCOERCECLOCALE": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = proc.run([sys.executable, "-c", _PROGRAM, mask, ("/", tmp_path)[number % 2], tree, archive], env=env)
        answers.add(done.stdout)
    assert len(answers) == 1 and answers.pop().count(b"\n") == 2
