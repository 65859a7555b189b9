// Libraries are compressed, which halves the file. All scripts run here, in their order.
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}
async function runAll() {
  for (const stored of document.querySelectorAll("script.packed, script.waiting")) {
    const script = document.createElement("script"), { textContent } = stored;
    script.textContent = stored.className === "packed" ? await unpacked(textContent) : textContent;
    document.body.append(script);
  }
}
if (window.DecompressionStream) runAll();
else document.getElementById("old").hidden = false;
