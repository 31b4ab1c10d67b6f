"""The gateway's HTTP client against servers that say exactly what a test wants."""

import asyncio
import datetime
import ipaddress
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.serve.gateway.upstream import Upstream, UpstreamError

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def run(answers, use, **options):
    """Serve connections; the n-th request on any of them gets the n-th list of packets."""
    seen = []

    async def main():
        async def serve(reader, writer):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = [
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.startswith(b"content-length")
                ]
                seen.append(head + (await reader.readexactly(length[0]) if length else b""))
                for packet in answers[len(seen) - 1]:
                    if packet is None:
                        writer.close()
                        return
                    if isinstance(packet, asyncio.Event):
                        await packet.wait()
                    elif packet == "pause":
                        await asyncio.sleep(0.3)
                    elif packet == "wait":
                        await asyncio.sleep(30)
                    else:
                        writer.write(packet)
                        await asyncio.sleep(0.01)

        async def handle(reader, writer):
            try:
                await serve(reader, writer)
            except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1")
        port = server.sockets[0].getsockname()[1]
        upstream = Upstream(f"http://127.0.0.1:{port}/base/v1", **options)
        try:
            async with asyncio.timeout(60):
                return await use(upstream)
        finally:
            upstream.close()
            server.close()

    return asyncio.run(main()), seen


async def ask(upstream, body=b"{}"):
    answer = await upstream.request("POST", "/v1/x?q=1", [(b"a", b"b")], body)
    try:
        return answer.status, await answer.read_all()
    finally:
        answer.close()


@pytest.mark.parametrize(
    ("packets", "expected"),
    [
        ([OK], (200, b"ok")),
        ([OK[:20], OK[20:40], OK[40:]], (200, b"ok")),
        (
            [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n", b"0\r\n\r\n"],
            (200, b"ok"),
        ),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", OK], (200, b"ok")),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], (204, b"")),
        ([b"HTTP/1.1 503 Busy\r\ncontent-length: 1\r\n\r\nx"], (503, b"x")),
        ([b"HTTP/1.1 200 OK\r\n\r\nup to ", b"the end", None], (200, b"up to the end")),
    ],
)
def test_answers_are_read_in_every_form(packets, expected):
    found, seen = run([packets], ask)
    assert found == expected
    assert seen[0].startswith(b"POST /base/v1/x?q=1 HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"accept-encoding: identity\r\na: b\r\ncontent-length: 2\r\n\r\n{}" in seen[0]


@pytest.mark.parametrize(
    "packets",
    [
        [None],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", None],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n", None],
        [b"HTTP/1.1 200", None],
        [b"SSH-2.0-OpenSSH_9.2\r\n"],
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(packets):
    with pytest.raises(UpstreamError):
        run([packets], ask)


def test_silence_is_an_error_after_its_time():
    with pytest.raises(UpstreamError, match=r"no answer within 0\.1 s"):
        run([["wait"]], ask, silence_s=0.1)
    begun = [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", "wait"]

    async def ask_patiently(upstream):
        upstream._silence_s = 60.0  # for the head, however long it takes
        answer = await upstream.request("POST", "/v1/x", [], b"{}")
        answer._silence_s = 0.1
        return await answer.read_all()

    with pytest.raises(UpstreamError, match=r"nothing more of the answer within 0\.1 s"):
        run([begun], ask_patiently, silence_s=0.1)


def test_a_kept_connection_is_used_again_and_replaced_when_it_was_closed():
    may_close = asyncio.Event()

    async def use(upstream):
        found = [await ask(upstream)]
        found.append(await ask(upstream))
        (connection,) = upstream._idle
        may_close.set()
        while connection.is_open:
            await asyncio.sleep(0.001)
        return [*found, await ask(upstream)]

    found, seen = run([[OK], [OK, may_close, None], [OK]], use)
    assert found == [(200, b"ok")] * 3
    assert len(seen) == 3


def test_a_request_that_an_engine_began_with_is_not_sent_twice():
    async def use(upstream):
        await ask(upstream)
        upstream._idle[0].connect_s = 0.0  # however long it took: the pause is longer
        with pytest.raises(UpstreamError, match="closed without an answer"):
            await ask(upstream)

    _, seen = run([[OK], ["pause", None], [OK]], use)
    assert len(seen) == 2


def test_the_answer_to_head_has_no_body():
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\n"

    async def use(upstream):
        answer = await upstream.request("HEAD", "/v1/models", [])
        body = await answer.read_all()
        answer.close()
        return body, await ask(upstream)

    found, seen = run([[head], [OK]], use, silence_s=30)
    assert found == (b"", (200, b"ok"))
    assert len(seen) == 2


def test_credentials_in_the_url_are_refused_and_not_shown():
    for url in ("http://user:secret@host", "http://host/v1?key=secret", "ftp://a:secret@host"):
        with pytest.raises(ConfigInvalidError, match="upstream_key_env") as error:
            Upstream(url)
        assert "secret" not in str(error.value)


def test_an_answer_of_another_connection_is_not_mixed_in():
    async def use(upstream):
        first = await upstream.request("POST", "/v1/x", [], b"1")
        second = await upstream.request("POST", "/v1/x", [], b"2")
        one, two = await first.read_all(), await second.read_all()
        first.close(), second.close()
        return one, two

    answers = [
        [b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n", b"a"],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n", b"b"],
    ]
    assert run(answers, use)[0] == (b"a", b"b")


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://x", "http://", "http://x:port", "http://[x"]
)
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigInvalidError, match="expected a URL such as"):
        Upstream(url)


def test_nobody_there_is_an_error():
    async def use(_):
        return await ask(Upstream("http://127.0.0.1:1"))

    with pytest.raises(UpstreamError):
        run([], use)


def make_certificate(folder):
    """Write a key and a certificate for 127.0.0.1 that signs itself; return its path."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "engine")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "engine.pem"
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, *form)
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.mark.parametrize("is_trusted", [True, False])
def test_an_engine_with_tls_is_reached_if_its_certificate_is_trusted(
    tmp_path, monkeypatch, is_trusted
):
    path = make_certificate(tmp_path)
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(path))

    async def main():
        async def serve(reader, writer):
            for _ in range(2):
                await reader.readuntil(b"{}")
                writer.write(OK)

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        server = await asyncio.start_server(serve, "127.0.0.1", ssl=context)
        upstream = Upstream(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            return [await ask(upstream), await ask(upstream)]
        finally:
            upstream.close()
            server.close()

    if is_trusted:
        assert asyncio.run(main()) == [(200, b"ok")] * 2
    else:
        with pytest.raises(UpstreamError, match="certificate"):
            asyncio.run(main())
