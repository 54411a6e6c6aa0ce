"""Defines an opener of addresses that follows no redirect, because a token is for one address."""

from __future__ import annotations

import urllib.request
from typing import Any


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error."""

    def redirect_request(self, *arguments: Any) -> None:
        """Returns no request, so that the opener raises HTTPError with the status of the redirect."""
