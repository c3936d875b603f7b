// The gateway's events: the batches and the workers as they change.
//
// The gateway ends a stream after a while, and the browser opens it again. So a removed key ends
// the page's stream, too. A connection counts as lost when it is gone for some seconds.
// A browser has six connections to a gateway, for all of its tabs. So a tab that is not seen for
// some time gives its stream back.

const LOST_MS = 4000;
const RETRY_MS = 3000;
const UNSEEN_MS = 15_000;

export class Live {
  // `onEvent` gets (name, data). `onLink` gets "live", "lost" or "closed".
  constructor(path, onEvent, onLink) {
    Object.assign(this, { path, onEvent, onLink, source: null, timer: 0, isEnded: false });
    this.unseen = 0;
    this.onSeen = () => this.seen(!document.hidden);
    document.addEventListener("visibilitychange", this.onSeen);
    this.open();
  }

  seen(isSeen) {
    clearTimeout(this.unseen);
    if (!isSeen) this.unseen = setTimeout(() => this.close(), UNSEEN_MS);
    else if (!this.source) this.open();
  }

  close() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.source?.close();
    this.source = null;
  }

  open() {
    if (this.isEnded) return;
    const source = new EventSource(this.path);
    this.source = source;
    for (const name of ["batches", "workers", "history"]) {
      source.addEventListener(name, (event) => this.onEvent(name, JSON.parse(event.data)));
    }
    source.onopen = () => {
      clearTimeout(this.timer);
      this.timer = 0;
      this.onLink("live");
    };
    source.onerror = () => {
      this.timer ||= setTimeout(() => this.onLink("lost"), LOST_MS);
      if (source.readyState !== EventSource.CLOSED) return;
      this.onLink("closed"); // refused: the browser does not try again by itself
      setTimeout(() => this.source === source && this.open(), RETRY_MS);
    };
  }

  end() {
    this.isEnded = true;
    clearTimeout(this.unseen);
    document.removeEventListener("visibilitychange", this.onSeen);
    this.close();
  }
}
