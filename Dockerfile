# The image of `fedsim launch --on kubernetes`: the install of README.md, for a user without rights.
#     docker build --tag REGISTRY/fedsim:TAG . && docker push REGISTRY/fedsim:TAG
# Files of your own (--algo FILE.py:NAME and the like) and data sets go into an image made FROM this one, or, data, into a claim.
FROM python:3.11-slim
RUN useradd --uid 1000 --create-home fedsim
COPY . /opt/fedsim
RUN pip install --no-cache-dir -e /opt/fedsim
USER 1000
WORKDIR /home/fedsim
CMD ["fedsim", "--help"]
