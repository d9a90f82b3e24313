"""What execnet starts as a worker's Python: it asks tests/forked.py for a fork, and waits."""

import signal
import socket
import sys

signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker ends, and this with it
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
socket.send_fds(line, [sys.argv[-1].encode()], [0, 1, 2])
line.recv(1)  # ends with the worker
