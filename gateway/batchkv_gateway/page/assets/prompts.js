// Prompts from the viewer's own file. The server keeps none of rows that have ended.
//
// The file stays in the browser: a line is read when somebody wants to see it.

const MARK_LINES = 1000; // one offset is kept for so many lines
const MAX_LINE_BYTES = 16 * 2 ** 20;
const NEWLINE = 10;

const chosen = new Map(); // id of a batch -> PromptFile

export function fileOf(id) {
  return chosen.get(id) ?? null;
}

export function choose(id, file) {
  chosen.set(id, new PromptFile(file));
}

class PromptFile {
  constructor(file) {
    this.file = file;
    this.name = file.name;
    this.marks = [0]; // the offset of line 1, 1001, 2001 ...
    this.scanning = null;
  }

  // The prompts of these lines: Map of line -> text or messages. Lines that are none are left out.
  async read(lines) {
    this.scanning ??= this.scan();
    await this.scanning;
    const found = new Map();
    for (const mark of new Set(lines.map((line) => Math.floor((line - 1) / MARK_LINES)))) {
      if (mark >= this.marks.length) continue;
      const text = await this.file.slice(this.marks[mark], this.marks[mark + 1]).text();
      const parts = text.split("\n");
      for (const line of lines) {
        const index = line - 1 - mark * MARK_LINES;
        if (index >= 0 && index < parts.length && index < MARK_LINES) {
          const prompt = promptOf(parts[index], this.name);
          if (prompt) found.set(line, prompt);
        }
      }
    }
    return found;
  }

  // Find where every thousandth line begins, in one pass without keeping the text.
  async scan() {
    const reader = this.file.stream().getReader();
    let [at, line] = [0, 1];
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      let from = value.indexOf(NEWLINE);
      while (from >= 0) {
        line += 1;
        if ((line - 1) % MARK_LINES === 0) this.marks.push(at + from + 1);
        from = value.indexOf(NEWLINE, from + 1);
      }
      at += value.length;
    }
  }
}

function promptOf(raw, name) {
  const text = raw.replace(/^\ufeff/, "").trim();
  if (!text || text.length > MAX_LINE_BYTES) return null;
  if (name.endsWith(".txt")) return { prompt: text };
  try {
    const found = JSON.parse(text);
    const body = found.body ?? found;
    if (Array.isArray(body.messages)) return { messages: body.messages };
    return typeof body.prompt === "string" ? { prompt: body.prompt } : null;
  } catch {
    return null;
  }
}
