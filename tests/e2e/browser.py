"""A headless Chromium, driven as a person would: real key presses, scripts in the page, print. Speaks the DevTools protocol over the pipes 3 and 4."""
import json
import os
import subprocess


class Browser:
    def __init__(self, program, profile, url):
        to_browser, self.write_end = os.pipe()
        self.read_end, from_browser = os.pipe()
        def take_pipes():
            os.dup2(to_browser, 3)
            os.dup2(from_browser, 4)
        self.process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}", "--remote-debugging-pipe",
             "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1200,1000"],
            preexec_fn=take_pipes, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.number, self.rest, self.session, self.messages = 0, b"", None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)
        self.wait_for("Page.loadEventFired")

    def receive(self):
        while b"\0" not in self.rest:
            part = os.read(self.read_end, 1 << 20)
            if not part:
                raise RuntimeError("the browser is gone")
            self.rest += part
        line, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(line)
        if message.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.messages.append(json.dumps(message["params"])[:500])
        return message

    def wait_for(self, method):
        while self.receive().get("method") != method:
            pass

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params} | ({"sessionId": self.session} if self.session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.write_end, data):]
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def run(self, script):
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def press(self, key, code=None):
        number = {"Tab": 9, "Enter": 13, " ": 32, "ArrowRight": 39, "ArrowDown": 40}[key]
        text = {"Enter": "\r", " ": " "}.get(key, "")
        common = {"key": key, "code": code or key, "windowsVirtualKeyCode": number, "nativeVirtualKeyCode": number}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def tab_through(self, most=400):
        """Presses Tab through the whole page: [(tag, text, whether an outline shows where the focus is)]."""
        here = """(() => { const e = document.activeElement, s = getComputedStyle(e);
            return [e.tagName, (e.textContent || e.value || "").trim().slice(0, 60), s.outlineStyle !== "none" && parseFloat(s.outlineWidth) > 0]; })()"""
        found = []
        for _ in range(most):
            self.press("Tab")
            stop = self.run(here)
            if stop[0] in ("BODY", "HTML"):
                break
            found.append(tuple(stop))
        return found

    def print_pdf(self):
        import base64
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])

    def close(self):
        self.process.kill()
        self.process.wait()
