"""`sumibi`, with the service account that a pod would have in the directory given first."""

import sys
from pathlib import Path

from sumibi.cli import main
from sumibi.gateway.epp import kubeapi

account = (Path(sys.argv.pop(1)),)
kubeapi.in_cluster.__defaults__ = account
kubeapi.own_namespace.__defaults__ = account
main()
