"""A server for tests that copy to a place over the network."""

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest


@pytest.fixture
def s3(monkeypatch):
    """An S3-compatible server on loopback, in a process of its own."""
    for package in ("moto", "s3fs", "flask"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: `make slow` installs it")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    endpoint = f"http://127.0.0.1:{port}"
    try:
        limit = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(endpoint, timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < limit and server.poll() is None
                time.sleep(0.1)
        for key, value in {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_ENDPOINT_URL": endpoint,
                           "AWS_DEFAULT_REGION": "us-east-1"}.items():  # fmt: skip
            monkeypatch.setenv(key, value)
        # In another process: an event loop that runs in this one would not survive the forks to come.
        make = "import s3fs, os; s3fs.S3FileSystem(endpoint_url=os.environ['AWS_ENDPOINT_URL']).mkdir('bucket')"
        subprocess.run([sys.executable, "-c", make], check=True, env=os.environ)
        yield "s3://bucket/runs/one"
    finally:
        server.terminate()
        server.wait(10)
