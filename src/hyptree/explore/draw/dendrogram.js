document.querySelectorAll('.merge').forEach(figure => {
  const seen = figure.querySelector('.seen'), svg = seen.querySelector('svg');
  const leaf = seen.dataset.leaf.split(',').map(Number), columns = Number(seen.dataset.columns);
  const patches = leaf.map((at, k) => {
    const rect = document.createElementNS('http://www.w3.org/2000/svg', 'rect');
    rect.setAttribute('x', k % columns); rect.setAttribute('y', Math.floor(k / columns));
    rect.setAttribute('width', 1); rect.setAttribute('height', 1);
    return svg.appendChild(rect);
  });
  figure.querySelectorAll('g[data-from]').forEach(link => {
    const from = Number(link.dataset.from), to = Number(link.dataset.to);
    link.addEventListener('pointerenter', () => {
      link.classList.add('on'); seen.classList.add('lit');
      patches.forEach((rect, k) => rect.classList.toggle('on', leaf[k] >= from && leaf[k] < to));
    });
    link.addEventListener('pointerleave', () => { link.classList.remove('on'); seen.classList.remove('lit'); });
  });
});
