"""Which certificate files are refused, and how replaced files are detected."""

import logging
import time
from pathlib import Path

import pytest

from services.common.tls.certificates import CertificateError
from tests.certificates import LOOPBACK, ONE_DAY, Authority, Files, Issued, SwappedDirectory

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from services.common.tls.certificate_check import check_certificate
from services.common.tls.certificate_watch import CertificateWatch


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def files(tmp_path: Path, authority: Authority) -> Files:
    return Files(tmp_path / "own").write(authority.issue(*LOOPBACK), authority)


def watching(files: Files) -> CertificateWatch:
    return CertificateWatch("internal", files.files(), check_certificate)


def complaint(files: Files) -> str:
    with pytest.raises(CertificateError) as caught:
        watching(files)
    return str(caught.value)


def test_what_fits_together_is_taken(files: Files) -> None:
    watch = watching(files)
    assert watch.current.pem.chain == files.cert.read_bytes()
    assert watch.current.pem.ca == files.ca.read_bytes()
    assert 0.9 * ONE_DAY < watch.seconds_left <= ONE_DAY


def test_a_file_that_is_missing_is_named(files: Files) -> None:
    files.key.unlink()
    expected = f"--internal-tls-key-file {files.key} cannot be read: No such file or directory"
    assert complaint(files) == expected


@pytest.mark.parametrize("name", ["cert", "ca"])
def test_a_damaged_certificate_is_refused(files: Files, name: str) -> None:
    path = getattr(files, name)
    path.write_bytes(path.read_bytes()[:200])
    assert complaint(files) == (
        f"--internal-tls-{name}-file {path} holds no certificate in PEM form, or a damaged one"
    )


def test_a_damaged_key_is_refused(files: Files) -> None:
    files.key.write_text("-----BEGIN PRIVATE KEY-----\n")
    assert complaint(files).endswith("holds no key in PEM form, or a damaged one")


def test_an_encrypted_key_is_refused(files: Files) -> None:
    key = load_pem_private_key(files.key.read_bytes(), None)
    encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x"))
    files.key.write_bytes(encrypted)
    assert complaint(files).endswith("is encrypted; a key without a passphrase is needed")


def test_the_key_of_another_certificate_is_refused(files: Files, authority: Authority) -> None:
    files.key.write_bytes(authority.issue(*LOOPBACK).key)
    assert complaint(files).endswith(f"is not the key of the certificate in {files.cert}")


def test_a_certificate_that_has_expired_is_refused(files: Files, authority: Authority) -> None:
    files.write(authority.issue(*LOOPBACK, seconds=-60))
    assert "holds a certificate that expired on 20" in complaint(files)


def test_a_replacement_is_taken_once(files: Files, authority: Authority) -> None:
    watch = watching(files)
    before = watch.current
    watch.look()
    assert watch.current is before
    files.write(authority.issue("other.example"))
    watch.look()
    assert watch.current.pem.chain == files.cert.read_bytes() != before.pem.chain
    watch.look()
    assert (watch.num_reloads, watch.is_usable) == (1, True)


def test_a_directory_that_is_swapped_is_noticed(tmp_path: Path, authority: Authority) -> None:
    secret = SwappedDirectory(tmp_path / "secret")
    files = secret.swap(authority.issue(*LOOPBACK), authority)
    watch = watching(files)
    before = watch.current
    secret.swap(authority.issue(*LOOPBACK), authority)
    watch.look()
    assert watch.current.pem.chain == files.cert.read_bytes() != before.pem.chain


def test_half_a_replacement_changes_nothing_until_it_is_whole(
    files: Files, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    watch = watching(files)
    before = watch.current
    new = authority.issue(*LOOPBACK)
    files.cert.write_bytes(new.chain)
    for _ in range(3):
        watch.look()
    assert (watch.current, watch.is_usable) == (before, False)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message == (
        f"--internal-tls-key-file {files.key} is not the key of the certificate in {files.cert}; "
        "the previous internal certificate stays in use"
    )
    files.key.write_bytes(new.key)
    watch.look()
    assert watch.current.pem.chain == new.chain
    assert (watch.num_reloads, watch.is_usable) == (1, True)


def test_files_are_usable_again_with_the_previous_certificate(
    files: Files, authority: Authority
) -> None:
    watch = watching(files)
    good = Issued(files.cert.read_bytes(), files.key.read_bytes())
    files.write(authority.issue(*LOOPBACK, seconds=-60))
    watch.look()
    assert not watch.is_usable
    files.write(good)
    watch.look()
    assert (watch.num_reloads, watch.is_usable) == (0, True)


def test_a_certificate_near_its_end_is_warned_of_once(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    now = time.time()
    watch = CertificateWatch("internal", files.files(), check_certificate, lambda: now)
    watch.look()
    assert not caplog.records
    now += 0.95 * ONE_DAY
    watch.look()
    watch.look()
    (record,) = caplog.records
    assert record.message.startswith(
        "the internal certificate ends soon and must be replaced: it is valid for"
    )
    now += ONE_DAY
    assert watch.seconds_left < 0


def test_the_thread_takes_a_replacement(files: Files, authority: Authority) -> None:
    watch = watching(files)
    with watch.running(period_seconds=0.01):
        new = authority.issue(*LOOPBACK)
        files.write(new)
        end = time.monotonic() + 60
        while watch.current.pem.chain != new.chain:
            assert time.monotonic() < end
            time.sleep(0.005)
