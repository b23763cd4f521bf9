// The faults of the page that can be seen: boxes of texts and of fields, in pixels, and colours as they end up on the screen.
() => {
  const faults = new Set();
  const name = (it) => `${it.tagName.toLowerCase()} "${(it.textContent || it.name || "").trim().slice(0, 40)}"`;
  const unseen = ".hidden, .skip, thead, title, datalist, option, script";
  const isSeen = (it) => it.checkVisibility({ visibilityProperty: true }) && !it.closest(unseen);
  const boxOf = (it) => it.getBoundingClientRect();
  const scrolls = (it) => it.closest(".chart, .timeline, .events, pre, textarea, .scroll");
  const html = document.documentElement;
  if (html.scrollWidth > html.clientWidth) faults.add(`the page is ${html.scrollWidth} px wide`);
  for (const it of document.querySelectorAll(".scroll")) {
    if (it.scrollWidth > it.clientWidth + 1) faults.add(`a table is cut: ${it.ariaLabel}, ${it.scrollWidth} px`);
  }
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const it = node.parentElement;
    if (!node.data.trim() || !isSeen(it)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) if (box.width > 1 && box.height > 1) texts.push({ it, box });
  }
  const rgb = (text) => (text.match(/[\d.]+/g) ?? [0, 0, 0]).map(Number);
  const linear = (value) => (value <= 10 ? value / 3294.6 : ((value / 255 + 0.055) / 1.055) ** 2.4); // WCAG 2.2
  const light = ([red, green, blue]) => 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
  const ground = (it) => {
    for (let at = it; at; at = at.parentElement) {
      const found = rgb(getComputedStyle(at).backgroundColor);
      if (found.length < 4 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  for (const { it, box } of texts) {
    const style = getComputedStyle(it);
    const svg = it.closest("svg");
    const size = parseFloat(style.fontSize) * (svg ? svg.getScreenCTM().a : 1);
    if (size < 10.99) faults.add(`text of ${size.toFixed(1)} px: ${name(it)}`);
    if (!scrolls(it) && (box.left < -0.5 || box.right > html.clientWidth + 0.5)) faults.add(`beyond the window: ${name(it)}`);
    const [one, other] = [light(rgb(svg ? style.fill : style.color)), light(ground(it))].sort((a, b) => b - a);
    const contrast = (one + 0.05) / (other + 0.05);
    if (contrast < 4.5) faults.add(`contrast of ${contrast.toFixed(2)}: ${name(it)}`);
    for (let at = it; at && at !== document.body; at = at.parentElement) {
      const { overflowX, textOverflow } = getComputedStyle(at);
      if (overflowX !== "hidden" || textOverflow === "ellipsis") continue;
      if (at.scrollWidth > at.clientWidth + 1) faults.add(`cut: ${name(it)}`);
    }
  }
  texts.sort((a, b) => a.box.top - b.box.top);
  texts.forEach((a, at) => {
    for (const b of texts.slice(at + 1)) {
      if (b.box.top > a.box.bottom - 2) break;
      if (a.it.contains(b.it) || b.it.contains(a.it)) continue;
      const wide = Math.min(a.box.right, b.box.right) - Math.max(a.box.left, b.box.left);
      const high = Math.min(a.box.bottom, b.box.bottom) - Math.max(a.box.top, b.box.top);
      if (wide > 1.5 && high > 3 && scrolls(a.it) === scrolls(b.it)) faults.add(`overlap: ${name(a.it)} and ${name(b.it)}`);
    }
  });
  const lines = "input:not([type=checkbox]):not([type=hidden])";
  for (const row of document.querySelectorAll(".filters, .actions, .buttons, .head, .where")) {
    const fields = [...row.querySelectorAll(`button, .button, select, ${lines}`)].filter(isSeen);
    const boxes = fields.map(boxOf);
    boxes.forEach((a, at) => boxes.slice(at + 1).forEach((b, more) => {
      const share = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (share > 4 && (Math.abs(a.bottom - b.bottom) > 1.5 || Math.abs(a.height - b.height) > 1.5))
        faults.add(`crooked: ${name(fields[at])} ${a.height} px high, ${name(fields[at + 1 + more])} ${b.height}`);
    }));
    for (const it of fields)
      if (it.matches("button, .button") && it.scrollWidth > it.clientWidth + 1) faults.add(`cut: ${name(it)}`);
  }
  for (const it of document.querySelectorAll("a.button, button, .top nav a, input, select")) {
    const { width, height } = boxOf(it);
    const least = it.matches("[type=checkbox]") ? 16 : 24; // its label can be touched, too
    if (isSeen(it) && it.type !== "hidden" && (height < least || width < 16))
      faults.add(`too small to be touched: ${name(it)}, ${width} x ${height}`);
  }
  return [...faults];
}
