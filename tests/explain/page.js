// Runs the report's script on a page that only keeps a tree of nodes, opens every tab and prints the text.
const fs = require("fs");
const html = fs.readFileSync(process.argv[2], "utf8");
const content = html.match(/id="content">([\s\S]*?)<\/script>/)[1];
const script = html.match(/<script>\n([\s\S]*?)<\/script>/)[1];
class Node {
  constructor(tag) { this.tag = tag; this.children = []; this.attributes = {}; this.style = {}; this.listeners = {}; this.value = ""; this.classList = { add() {}, remove() {} }; }
  setAttribute(name, value) { this.attributes[name] = value; if (name === "value") this.value = value; }
  addEventListener(name, run) { this.listeners[name] = run; }
  append(...nodes) { this.children.push(...nodes); }
  replaceChildren(...nodes) { this.children = nodes; if (this.tag === "select") this.value = nodes.length ? nodes[0].value : ""; }
  scrollIntoView() {}
  set textContent(text) { this.children = [text]; }
  get textContent() { return this.children.map(c => (typeof c === "string" || typeof c === "number" ? String(c) : c.textContent)).join(" "); }
  all() { return [this, ...this.children.flatMap(c => (c instanceof Node ? c.all() : []))]; }
  querySelectorAll(tag) { return this.all().filter(n => n.tag === tag); }
}
const known = { content: new Node("script"), summary: new Node("div"), tiles: new Node("div"), tabs: new Node("nav"), view: new Node("main") };
known.content.children = [content];
global.document = {
  getElementById: id => known[id], createElement: tag => { const n = new Node(tag); return n; }, createElementNS: (_, tag) => new Node(tag),
  querySelectorAll: () => known.tabs.children, querySelector: () => null,
};
const selects = Node.prototype.append;
Node.prototype.append = function (...nodes) { selects.apply(this, nodes); if (this.tag === "select" && !this.value && nodes.length) this.value = nodes[0].value; };
global.location = { hash: "" }; global.history = { replaceState() {} };
new Function(script)();
for (const tab of known.tabs.children) {
  tab.listeners.click();
  for (const row of known.view.all()) if (row.listeners.click) row.listeners.click();
  console.log(`== ${tab.textContent}\n${known.view.textContent}`);
}
