import hashlib

import pytest

from gigamask.datatools import checksums
from tests.errors import error_line

MD5 = hashlib.md5(b"abc").hexdigest()
SHA1 = hashlib.sha1(b"abc").hexdigest()
SHA256 = hashlib.sha256(b"abc").hexdigest()


@pytest.mark.parametrize(
    "text",
    [
        f"{MD5}  a.tar\n{SHA256} *deep/b.tar\n",
        f"MD5 (a.tar) = {MD5}\r\n{SHA256} *a b\\my b.tar\r\n",
        f"a.tar {MD5.upper()}\n./b.tar\t{SHA256}\n\n# by hand\n",
        f"file_name\tmd5\na.tar\t{MD5}\nb.tar\t{SHA256}\na.tar\t{MD5}",
    ],
)
def test_lists_in_either_order(tmp_path, text):
    path = tmp_path / "sums"
    path.write_text(text)
    second = "my b.tar" if "my" in text else "b.tar"
    assert checksums.read(path) == {"a.tar": MD5, second: SHA256}


@pytest.mark.parametrize(
    "text, message",
    [
        ("", r"sums: holds no checksum; give a list with a line 'SUM  NAME' for each file"),
        (
            f"{MD5} a.tar\nb.tar {MD5[:-1]}\n",
            r"line 2 is not a name and a sum of 32 \(md5\), 40 \(sha1\), 64 \(sha256\) "
            r"hexadecimal digits: 'b.tar",
        ),
        (f"{MD5} a.tar b.tar\n", r"line 1 is not a name and a sum"),
        (f"{MD5}\n", r"line 1 is not a name and a sum"),
        ("words\n", r"line 1 is not a name and a sum"),
        (
            f"{MD5} a.tar\n{SHA1} a.tar\n",
            rf"line 2 gives a.tar the sum {SHA1}, an earlier line {MD5}; keep the right one",
        ),
    ],
)
def test_what_is_no_list_is_refused(tmp_path, text, message):
    path = tmp_path / "sums"
    path.write_text(text)
    with error_line(message):
        checksums.read(path)


@pytest.mark.parametrize("known", [MD5, SHA1, SHA256])
def test_the_algorithm_follows_from_the_digits(tmp_path, known):
    (tmp_path / "a").write_bytes(b"abc")
    assert checksums.digest(tmp_path / "a", "0" * len(known)) == known
