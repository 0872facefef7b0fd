"""A real browser to look at pages with: Debian's chromium, or whatever chromium there is."""

import shutil
from contextlib import contextmanager

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def why_not():
    """Say why there is no browser here; nothing if there is one."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed: pip install 'gradgate[dev]'"
    return "" if executable() else "no chromium is installed: make browser"


def executable():
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def chromium():
    """Start the browser; nothing is downloaded."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser, address, *, size=(1280, 900), scheme="light", **more):
    """Open a page and wait until it has drawn itself; whatever it complains of or asks for is a failure."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, timezone_id="UTC", locale="en-US", **more
    )
    context.set_default_timeout(60_000)
    page = context.new_page()
    complaints, requests = [], []
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: requests.append(request.url))
    try:
        page.goto(address)
        page.locator("html[data-ready=yes]").wait_for(state="attached")
        yield page
        assert not complaints, complaints
        base = address.split("#")[0]
        assert all(url.startswith((base, "blob:", "data:")) for url in requests), requests
    finally:
        context.close()
