// Browsers start no workers from files on disk. There the search of the site runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html><title>search</title>";
      this.ready = new Promise((resolve, reject) => {
        frame.onload = () => {
          const inside = frame.contentWindow;
          const load = (source) => new Promise((done, failed) => {
            const script = inside.document.createElement("script");
            script.src = source;
            script.onload = done;
            script.onerror = failed;
            inside.document.head.append(script);
          });
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          inside.importScripts = (...sources) => Promise.all(sources.map(load));
          load(address).then(() => resolve(inside), reject);
        };
      });
      document.documentElement.append(frame);
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
  };
}
