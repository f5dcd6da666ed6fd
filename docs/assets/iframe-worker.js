// A browser starts no worker for a page from the disk, and the search of the site is a worker. There, an empty
// frame runs its scripts. docs/decisions/016-docs-site.md says why this is not the theme's script.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      const load = (src) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script")
          Object.assign(script, { src, onload: resolve, onerror: reject })
          inside.document.body.append(script)
        })
      inside.importScripts = (...urls) => urls.reduce((before, src) => before.then(() => load(src)), Promise.resolve())
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const loaded = load(new URL(url, document.baseURI).href)
      this.postMessage = (data) => loaded.then(() => inside.dispatchEvent(new MessageEvent("message", { data })))
      this.terminate = () => frame.remove()
    }
  }
